"""The scheduler as a process with a worker process: its answers, and its behaviour at the machine's limits."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from support.engine_harness import ENVIRONMENT
from support.processes import BOUND_SECONDS, EOS, VOCABULARY, Process, Running, endless, error_of, until
from support.toy import expected
from support.toy_worker import ToyOptions

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.wire.messages import Sampling


def test_metrics_are_served_during_the_drain(start: Callable[..., Running]) -> None:
    server = start(
        "--metrics-listen", "127.0.0.1:0", "--drain-timeout-seconds", "60", min_step_seconds=0.02, max_step_seconds=0.02
    )

    def figures() -> dict[str, float]:
        lines = (line.split() for line in server.metrics_page().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    list(server.stub.Generate(pb.GenerateRequest(text="The quick", sampling={"seed": 1, "max_tokens": 3})))
    found = figures()
    assert found["lineclear_requests_finished_total"] == found["lineclear_e2e_request_latency_seconds_count"] == 1
    assert found["lineclear_worker_up"] == 1
    until(lambda: figures().get('lineclear_requests_total{finish_reason="length"}') == 1)
    call = server.stub.Generate(endless())
    next(call)
    server.popen.send_signal(signal.SIGTERM)
    until(lambda: figures()["lineclear_draining"])
    call.cancel()
    assert server.exit_code() == 0


def test_demo_model_is_found_and_fixed_size_strategy_is_logged(start: Callable[..., Running]) -> None:
    flags = ("--batching-strategy", "fixed_size", "--max-batch-size", "3")
    server = start(*flags, demo=True, vocab_size=4096)
    event = server.wait_for("fixed_size_waits")
    assert (event["for_requests"], event["at_most_seconds"]) == (3, None)
    assert server.stub.GetModel(pb.GetModelRequest()).model_id == "lineclear-demo"
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
    calls = [server.stub.Generate(pb.GenerateRequest(chat=chat, sampling={"max_tokens": 3})) for _ in range(3)]
    assert all(list(call) for call in calls)


def test_worker_in_a_separate_container(model: Path, tmp_path: Path) -> None:
    """It is smaller than the flags of the scheduler say, which is logged once for each of them."""
    directory = tmp_path / "sockets"
    flags = ["--model", str(model), "--listen", f"unix:{tmp_path}/grpc", "--socket-directory", str(directory)]
    flags += ["--max-batch-size", "128", "--target-batch-tokens", "8192", "--log-format", "json"]
    process, worker = Process(flags), None
    try:
        process.wait_for("listening")
        with grpc.insecure_channel(f"unix:{tmp_path}/grpc") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            assert error_of(stub.Generate(endless())).reason == "SERVER_STARTING"
            command = ToyOptions(vocab_size=VOCABULARY).arguments(directory)
            worker = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
            process.wait_for("worker_joined")
            assert len([t for r in stub.Generate(endless()) for t in r.token_ids]) == 500
            limits = stub.GetModel(pb.GetModelRequest()).limits
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    finally:
        if worker is not None:
            worker.kill()
            worker.wait()
        process.end()
    assert (limits.max_batch_size, limits.target_batch_tokens) == (64, 4096)
    warnings = [line for line in process.lines if line.get("event") == "worker_caps_batches"]
    assert [(line["level"], line["flag"], line["value"], line["worker_value"]) for line in warnings] == [
        ("warning", "--max-batch-size", 128, 64),
        ("warning", "--target-batch-tokens", 8192, 4096),
    ]


def test_streams_continue_without_free_descriptors(start: Callable[..., Running]) -> None:
    """Open connections up to the descriptor limit during an answer.

    The answer is exact, probes on an open connection succeed, and a new caller connects after the connections close.
    """
    server = start(min_step_seconds=0.004, max_step_seconds=0.004)
    call = server.stub.Generate(endless())
    first = next(call)
    limit = len(os.listdir(f"/proc/{server.popen.pid}/fd")) + 20
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (limit, limit))
    host, _, port = server.address.rpartition(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(100)]
    until(lambda: len(os.listdir(f"/proc/{server.popen.pid}/fd")) >= limit)
    assert server.health.Check(health_pb2.HealthCheckRequest(service="readiness")).status == 1
    tokens = [*first.token_ids, *(t for r in call for t in r.token_ids)]
    assert tokens == expected([5], Sampling(seed=1), 500, VOCABULARY)
    for connection in connections:
        connection.close()
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as late:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[6]), sampling={"seed": 1, "max_tokens": 2})
        answer = inference_pb2_grpc.InferenceServiceStub(late).Generate(
            request, wait_for_ready=True, timeout=BOUND_SECONDS
        )
        assert [t for r in answer for t in r.token_ids] == expected(
            [6], Sampling(seed=1, stop_ids=(EOS,)), 2, VOCABULARY
        )
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
