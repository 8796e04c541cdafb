"""The admin RPCs: their effects and responses, on a fake process and on a real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from support.engine_harness import ENVIRONMENT
from support.processes import VOCABULARY, Process, Running, endless, starting
from support.processes import until as wait_until
from support.serving import Serving, error_of, serving, text_request, until
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected
from support.worker_kills import signal_worker
from typer.testing import CliRunner, Result

from lineclear.cli.app import app
from lineclear.client import Client, Operation, StepProfile
from lineclear.errors import ProfileFailed, RecordingFailed, WorkerRestartFailed
from lineclear.v1 import admin_pb2 as pb
from lineclear.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from lineclear.wire.messages import Sampling


async def admin_stub(s: Serving) -> Any:
    return admin_pb2_grpc.AdminServiceStub(grpc.aio.insecure_channel(s.server.admin_address))


async def test_admin_calls_run_their_operation(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a") as s:
        stub = await admin_stub(s)
        assert (await stub.DumpRecording(pb.DumpRecordingRequest())).path == "recordings/flight-0.jsonl"
        await stub.FlushPrefixCache(pb.FlushPrefixCacheRequest())
        answer = await stub.SetLogLevel(pb.SetLogLevelRequest(level=pb.LOG_LEVEL_ERROR))
        assert answer.previous == pb.LOG_LEVEL_INFO
        for level in (pb.LOG_LEVEL_UNSPECIFIED, 99):
            error = await error_of(stub.SetLogLevel(pb.SetLogLevelRequest(level=level)))
            assert (error.reason, [v.field for v in error.violations]) == ("INVALID_REQUEST", ["level"])
        await stub.Drain(pb.DrainRequest())
        assert s.operations.calls == ["dump", "flush", "error", "shut_down"]
        s.operations.failure = RecordingFailed("the disk is full")
        error = await error_of(stub.DumpRecording(pb.DumpRecordingRequest()))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "RECORDING_FAILED")


async def test_restart_of_workers_returns_their_pids(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a") as s:
        stub = await admin_stub(s)
        assert list((await stub.RestartWorkers(pb.RestartWorkersRequest())).pids) == [12, 13]
        s.operations.failure = WorkerRestartFailed("worker 1 was not restarted")
        error = await error_of(stub.RestartWorkers(pb.RestartWorkersRequest()))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "WORKER_RESTART_FAILED")


async def test_profile_has_defaults_and_limits(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a") as s:
        stub = await admin_stub(s)
        answer = await stub.Profile(pb.ProfileRequest())
        assert (answer.trace, answer.num_steps) == (b"trace", 20)
        await stub.Profile(pb.ProfileRequest(num_steps=1000, worker=3, max_duration={"seconds": 60}))
        assert s.operations.calls == ["profile 20 0 10", "profile 1000 3 60"]
        wrong = {"num_steps": 1001, "max_duration": {"nanos": -1}}
        for fields in (wrong, {"num_steps": 1001, "max_duration": {"seconds": 61}}):
            error = await error_of(stub.Profile(pb.ProfileRequest(**fields)))
            assert [v.field for v in error.violations] == ["num_steps", "max_duration"]
        s.operations.failure = ProfileFailed("worker 3 is not joined")
        error = await error_of(stub.Profile(pb.ProfileRequest()))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "PROFILE_FAILED")


async def test_drain_returns_remaining_requests_and_time(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a", drain_timeout_seconds=77) as s:
        stub = await admin_stub(s)
        calls = [s.generate(text_request(request_id=f"r{n}")) for n in range(3)]
        await s.engine.next_request(3)
        answer = await stub.Drain(pb.DrainRequest())
        assert (answer.requests_in_progress, answer.time_remaining.ToSeconds()) == (3, 77)
        calls[0].cancel()
        await until(lambda: len(s.service.streams) == 2)
        draining = asyncio.ensure_future(s.manager.drain(2000.0))
        await until(lambda: s.manager.drain_remaining_seconds is not None)
        answer = await stub.Drain(pb.DrainRequest())
        assert answer.requests_in_progress == 2
        assert 1000 < answer.time_remaining.ToMilliseconds() / 1000 <= 2000
        draining.cancel()


ADMIN = ("--admin-listen", "127.0.0.1:0")
SLOW = {"min_step_seconds": 0.01, "max_step_seconds": 0.01}


def admin_address(server: Process) -> str:
    return str(server.wait_for("listening")["admin_address"])


def admin(server: Process, *arguments: str) -> Result:
    command = ["admin", *arguments, "--target", admin_address(server)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Running]]:
    with starting(model, *ADMIN) as start_scheduler:
        yield start_scheduler


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording directory of `server`, which makes it."""
    return tmp_path_factory.mktemp("admin") / "recordings"


@pytest.fixture(scope="module")
def server(model: Path, recordings: Path) -> Iterator[Running]:
    with starting(model, *ADMIN, "--recording-directory", str(recordings)) as start_scheduler:
        yield start_scheduler()


def test_recording_replays(server: Running) -> None:
    assert len(list(server.stub.Generate(endless()))) > 1
    paths = []
    for _ in range(2):  # the second dump soon after the first is accepted
        result = admin(server, "dump")
        assert result.exit_code == 0, result.stderr
        paths.append(Path(result.stdout.strip()))
    assert [path.name for path in paths] == ["flight-0.jsonl", "flight-1.jsonl"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 2
    command = [sys.executable, "-m", "lineclear.scheduler.main", "replay", str(paths[1])]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, "every decision the same" in done.stdout) == (0, True), done.stdout + done.stderr


def profile(server: Process, *arguments: str) -> Result:
    command = ["profile", *arguments, "--target", admin_address(server)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


def test_profile_of_the_next_steps(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(**SLOW)
    result = profile(server, "--seconds", "0.1")
    assert (result.exit_code, "no step ran" in result.stderr) == (109, True), result.stderr
    stream = server.stub.Generate(endless())
    file = tmp_path / "profile.json.gz"
    result = profile(server, "--steps", "7", "--output", str(file))
    assert result.stdout.startswith("7 steps of 1.00 ms"), result.stderr
    assert StepProfile(file.read_bytes(), 7).operations() == [Operation("step", False, 7, 0.007)]
    assert "worker 5 is not joined" in profile(server, "--worker", "5").stderr
    assert profile(server, "--output", str(tmp_path / "none" / "x")).exit_code == 2
    assert len(list(stream)) > 1


def test_profile_ends_with_its_caller_or_worker(start: Callable[..., Running]) -> None:
    """The next one starts when a client has hung up, or when the worker is killed, which ends the call."""
    server = start(**SLOW)
    stub = admin_pb2_grpc.AdminServiceStub(grpc.insecure_channel(admin_address(server)))
    request = pb.ProfileRequest(num_steps=1000, max_duration={"seconds": 60})
    for _ in range(2):
        call = stub.Profile.future(request)
        wait_until(lambda: "for another call" in profile(server, "--seconds", "0.1").stderr)
        call.cancel()
        wait_until(lambda: "no step ran" in profile(server, "--seconds", "0.1").stderr)
    call = stub.Profile.future(request)
    wait_until(lambda: "for another call" in profile(server, "--seconds", "0.1").stderr)
    signal_worker(lambda: stats_of(server).worker.pid)
    assert "the worker was lost" in call.exception(PATIENCE_SECONDS).details()
    wait_until(lambda: "no step ran" in profile(server, "--seconds", "0.1").stderr)


def test_unwritable_recording_returns_the_reason(server: Running, recordings: Path) -> None:
    """A directory that others may enter is refused before the start; this one is opened to them later."""
    recordings.chmod(0o777)
    result = admin(server, "dump")
    recordings.chmod(0o700)
    assert result.exit_code != 0
    assert "0700" in result.stderr
    assert len(list(server.stub.Generate(endless()))) > 1


def test_flush_empties_the_prefix_cache(server: Running) -> None:
    request = endless()
    request.token_ids.ids[:] = range(6, 106)  # no other request begins with 6
    request.sampling.max_tokens = 2

    def cached() -> int:
        return int(list(server.stub.Generate(request))[-1].finished.usage.cached_tokens)

    assert cached() == 0
    assert cached() > 0
    assert admin(server, "flush").exit_code == 0
    assert cached() == 0


def test_log_level_reaches_scheduler_and_restarted_workers(start: Callable[..., Running]) -> None:
    """At level info a worker logs the end of its epoch: not for the two at a higher level, but for the third."""
    server = start()
    assert admin(server, "log-level", "warning").stdout == "warning, previously info\n"
    for number in (1, 2):
        assert list(server.stub.Generate(endless()))  # plans follow the level, so the worker has it
        signal_worker(lambda: stats_of(server).worker.pid, signal.SIGTERM)
        server.wait_for("worker_crashed", number)
    assert admin(server, "log-level", "info").stdout == "info, previously warning\n"
    assert list(server.stub.Generate(endless()))
    drained = admin(server, "drain", "--json")
    assert drained.exit_code == 0, drained.stderr
    remaining = json.loads(drained.stdout)
    assert (remaining["requests_in_progress"], remaining["seconds"] > 0) == (0, True)
    assert server.exit_code() == 0
    assert [line["log_level"] for line in server.lines if line.get("rpc") == "set_log_level"] == ["warning", "info"]
    assert len([line for line in server.lines if line["event"] == "request_ended"]) == 1
    events = [line["event"] for line in server.lines if line["process"] == "worker"]
    assert events == ["waiting_for_scheduler"] * 3 + ["stopping", "epoch_ended"]


@pytest.mark.parametrize("arguments", [["log-level"], ["log-level", "loud"], ["drain", "info"], ["stop"]])
def test_invalid_arguments_are_rejected(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["admin", *arguments, "--target", "unix:/absent"]).exit_code == 2


def test_workers_that_another_program_started_are_not_restarted(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    flags = [*ADMIN, "--socket-directory", f"{tmp_path}/run"]
    with Process(["--model", str(model), "--listen", "127.0.0.1:0", "--log-format", "json", *flags]) as process:
        result = admin(process, "restart-workers")
        assert result.exit_code != 0
        assert "send SIGTERM to one after the other" in result.stderr


def stats_of(server: Running) -> Any:
    """Return GetStats, which is offered at the admin address only."""
    with grpc.insecure_channel(admin_address(server)) as channel:
        return inference_pb2_grpc.InferenceServiceStub(channel).GetStats(inference_pb2.GetStatsRequest())


def joined(server: Running) -> list[Any]:
    return [worker for worker in stats_of(server).workers if worker.state == "joined"]


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Running]:
    """A server with two workers, which have joined."""
    flags = ("--num-workers", "2", "--max-batch-size", "5", "--metrics-listen", "127.0.0.1:0")
    with starting(model, *ADMIN, *flags) as start_scheduler:
        server = start_scheduler(**SLOW)
        wait_until(lambda: len(joined(server)) == 2)
        yield server


def test_stats_show_each_worker(pair: Running) -> None:
    streams = [pair.stub.Generate(endless(seed)) for seed in range(8)]
    for stream in streams:
        next(stream)
    found = joined(pair)
    assert [worker.index for worker in found] == [0, 1]
    assert all(worker.joins == 1 and worker.num_blocks and worker.device == "toy" for worker in found)
    stats = stats_of(pair)
    assert stats.gauges.num_blocks == sum(worker.num_blocks for worker in stats.workers)
    shown = CliRunner().invoke(app, ["stats", "--target", admin_address(pair)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.stderr
    for worker in found:
        assert str(worker.pid) in shown.stdout
    page = pair.metrics_page()
    for index in (0, 1):
        assert f'lineclear_worker_joined{{worker="{index}"}} 1.0' in page
        assert f'lineclear_worker_slot_joins_total{{worker="{index}"}} 1.0' in page
    for stream in streams:
        stream.cancel()


def test_batch_fills_the_slots_of_all_workers(pair: Running) -> None:
    """Also where GetStats is at the admin address only."""
    with Client(pair.address) as client:
        assert client.model().limits.num_slots == 10


def test_ready_while_one_worker_is_left(pair: Running) -> None:
    os.kill(joined(pair)[0].pid, signal.SIGKILL)
    wait_until(lambda: len(joined(pair)) == 1)
    assert pair.health.Check(health_pb2.HealthCheckRequest(service="readiness")).status == 1
    wait_until(lambda: [worker.joins for worker in joined(pair)] == [2, 1])
    page = pair.metrics_page()
    assert 'lineclear_worker_slot_joins_total{worker="0"} 2.0' in page
    assert 'worker="2"' not in page


def test_rolling_restart_ends_no_stream(pair: Running) -> None:
    before = {worker.pid for worker in joined(pair)}
    request = endless(3)
    request.sampling.max_tokens = 200
    streams = [pair.stub.Generate(request) for _ in range(6)]
    firsts = [list(next(stream).token_ids) for stream in streams]
    result = admin(pair, "restart-workers", "--json")
    assert result.exit_code == 0, result.stderr
    pids = json.loads(result.stdout)["pids"]
    assert len(pids) == 2
    assert not {*pids} & before
    wait_until(lambda: {worker.pid for worker in joined(pair)} == {*pids})
    right = expected((5,), Sampling(seed=3), 200, VOCABULARY)
    for first, stream in zip(firsts, streams, strict=True):
        assert first + [token for response in stream for token in response.token_ids] == list(right)


def test_second_restart_joins_the_first(pair: Running) -> None:
    def num_restarts() -> int:
        return len([line for line in pair.lines if line.get("event") == "worker_restarting"])

    before = num_restarts()
    with grpc.insecure_channel(admin_address(pair)) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        given_up = stub.RestartWorkers.future(pb.RestartWorkersRequest())
        pair.wait_for("worker_restarting", before + 1)
        given_up.cancel()
        pids = list(stub.RestartWorkers(pb.RestartWorkersRequest()).pids)
    wait_until(lambda: {worker.pid for worker in joined(pair)} == {*pids})
    assert num_restarts() == before + 2
