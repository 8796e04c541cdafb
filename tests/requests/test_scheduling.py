"""Change scheduling settings while the server runs: validation, values in force, and the effect on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.engine_harness import ENVIRONMENT
from support.processes import Running, endless, starting
from support.serving import HELLO, Serving, error_of, serving
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected
from support.worker_kills import signal_worker
from typer.testing import CliRunner, Result

from lineclear.cli.app import app
from lineclear.client import AdminClient, Client
from lineclear.errors import InvalidRequest
from lineclear.v1 import admin_pb2 as pb
from lineclear.v1 import admin_pb2_grpc, inference_pb2
from lineclear.wire.messages import Sampling


def stub_of(s: Serving) -> Any:
    return admin_pb2_grpc.AdminServiceStub(grpc.aio.insecure_channel(s.server.admin_address))


async def test_update_changes_what_is_set_and_returns_all(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a", max_queue_size=7) as s:
        stub = stub_of(s)
        before = (await stub.GetScheduling(pb.GetSchedulingRequest())).scheduling
        assert (before.scheduling_policy, before.max_queue_size, before.max_queue_size_per_tenant) == ("fifo", 7, 0)
        changes = pb.Scheduling(scheduling_policy="fair", max_queue_size=2, batch_timeout_ms=0.0)
        after = (await stub.UpdateScheduling(pb.UpdateSchedulingRequest(changes=changes))).scheduling
        wanted = pb.Scheduling()
        wanted.CopyFrom(before)
        wanted.MergeFrom(changes)
        assert after == wanted
        assert (await stub.GetScheduling(pb.GetSchedulingRequest())).scheduling == wanted
        assert s.operations.calls == ["switch to fair"]
        stats = s.stub_of(grpc.aio.insecure_channel(s.server.admin_address))
        assert (await stats.GetStats(inference_pb2.GetStatsRequest())).scheduling_policy == "fair"
        assert (await s.stub.GetModel(inference_pb2.GetModelRequest())).limits.max_queue_size == 2


async def test_changed_queue_limits_hold_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a") as s:
        changes = pb.Scheduling(max_queue_size=1)
        await stub_of(s).UpdateScheduling(pb.UpdateSchedulingRequest(changes=changes))
        call = s.generate()
        await s.engine.next_request()
        assert (await error_of(s.generate())).metadata["limit"] == "1"
        call.cancel()
        await s.idle()


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"scheduling_policy": "random"}, ["scheduling_policy"]),
    ({"batching_strategy": ""}, ["batching_strategy"]),
    ({"preemption_policy": "oldest"}, ["preemption_policy"]),
    ({"max_batch_size": 0}, ["max_batch_size"]),
    ({"max_batch_size": HELLO.num_slots + 1}, ["max_batch_size"]),
    ({"min_batch_size": 8, "max_batch_size": 4}, ["min_batch_size"]),
    ({"target_batch_tokens": 2**20 + 1}, ["target_batch_tokens"]),
    ({"batch_timeout_ms": -1.0}, ["batch_timeout_ms"]),
    ({"batch_timeout_ms": float("nan")}, ["batch_timeout_ms"]),
    ({"target_inter_token_latency_ms": 0.0}, ["target_inter_token_latency_ms"]),
    ({"max_prefill_slowdown": 0.5}, ["max_prefill_slowdown"]),
    ({"priority_aging_seconds": 0.0}, ["priority_aging_seconds"]),
    ({"max_queue_size": 0, "max_queue_tokens": 0}, ["max_queue_size", "max_queue_tokens"]),
    ({"max_queue_tokens_per_tenant": 2**31 + 1}, ["max_queue_tokens_per_tenant"]),
]


async def test_wrong_update_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a", max_batch_size=8) as s:
        stub = stub_of(s)
        before = (await stub.GetScheduling(pb.GetSchedulingRequest())).scheduling
        for changes, fields in BAD:
            good = {"max_queue_size": 5} if "max_queue_size" not in changes else {}
            request = pb.UpdateSchedulingRequest(changes=pb.Scheduling(**changes | good))
            error = await error_of(stub.UpdateScheduling(request))
            assert error.code == "INVALID_ARGUMENT"
            assert [v.field for v in error.violations] == [f"changes.{name}" for name in fields], changes
        assert (await stub.GetScheduling(pb.GetSchedulingRequest())).scheduling == before
        assert s.operations.calls == []


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with starting(model, "--admin-listen", f"unix:{tmp_path}/a") as start_scheduler:
        yield start_scheduler


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--target", f"unix:{tmp_path}/a"], env={"COLUMNS": "120"})

    return invoke


def asking(seed: int, max_tokens: int) -> inference_pb2.GenerateRequest:
    request = endless(seed)
    request.sampling.max_tokens = max_tokens
    return request


def test_queued_requests_follow_a_new_order_and_a_worker_loss_keeps_it(
    start: Callable[..., Running], command: Callable[..., Result], tmp_path: Path
) -> None:
    server = start(
        *("--max-batch-size", "1", "--recording-directory", str(tmp_path / "recordings")),
        min_step_seconds=0.02,
        max_step_seconds=0.02,
    )
    running = server.stub.Generate(asking(1, 40))
    next(running)
    long, short = server.stub.Generate(asking(2, 30)), server.stub.Generate(asking(3, 4))
    result = command("scheduling", "scheduling_policy=shortest", "priority-aging-seconds=1000")
    assert result.exit_code == 0, result.output
    assert "scheduling_policy=shortest\npreemption_policy=cheapest\n" in result.stdout
    tokens = [token for response in short for token in response.token_ids]
    assert tokens == expected([5], Sampling(seed=3), 4, 512)
    first = next(long)  # starts after the short one
    with Client(f"unix:{tmp_path}/a") as client:
        signal_worker(lambda: client.stats().worker.pid)
        received = [*first.token_ids, *(token for response in long for token in response.token_ids)]
        assert received == expected([5], Sampling(seed=2), 30, 512)
        admin = AdminClient(client)
        assert admin.scheduling()["scheduling_policy"] == "shortest"
        assert admin.update_scheduling(max_queue_size=3)["max_queue_size"] == 3
        with pytest.raises(InvalidRequest, match="no scheduling setting"):
            admin.update_scheduling(pipeline_depth=3)
    shown = json.loads(command("scheduling", "--json").stdout)
    assert (shown["scheduling_policy"], shown["max_queue_size"]) == ("shortest", 3)
    assert sum(1 for _ in running) >= 0
    path = command("admin", "dump").stdout.strip()
    replay = [sys.executable, "-m", "lineclear.scheduler.main", "replay", path]
    done = subprocess.run(replay, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, "every decision the same" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["fifo"], ["scheduling_policy=", "x"]])
def test_change_without_value_is_a_usage_error(command: Callable[..., Result], arguments: list[str]) -> None:
    assert command("scheduling", *arguments).exit_code == 2
