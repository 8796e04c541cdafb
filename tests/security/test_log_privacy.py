"""Prompts and answers appear in no log line, metric, stack dump or error of another caller.

The tests read every line of both processes at the debug level, during every kind of failure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.processes import RUN, TOKENIZER, VOCABULARY, Running, endless, starting, until
from support.toy import expected

from lineclear.scheduler.text.detokenizer import decode
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Sampling

MARKER = "XyzzyPlugh"
RARE = [307, 311, 313, 317, 331, 337]
"""Token ids that are adjacent in no other place."""


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Running]]:
    with starting(model, "--log-level", "debug", "--metrics-listen", "127.0.0.1:0") as start_scheduler:
        yield start_scheduler


def everything_wrong() -> Iterator[pb.GenerateRequest]:
    """Yield requests with the marker in every field that accepts text, most of them invalid."""
    text = f"{MARKER} said the {MARKER}"
    yield pb.GenerateRequest(text=text, sampling={"max_tokens": 20, "seed": 1})
    yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=RARE), sampling={"max_tokens": 20, "seed": 2})
    yield pb.GenerateRequest(text=text, stop={"strings": [MARKER, "e"]}, sampling={"max_tokens": 20})
    yield pb.GenerateRequest(text=text, stop={"strings": [MARKER * 20]})
    yield pb.GenerateRequest(text=text, request_id=f"{MARKER} with blanks")
    yield pb.GenerateRequest(text=text, cache_salt=MARKER * 10)
    yield pb.GenerateRequest(text=MARKER * 200)
    yield pb.GenerateRequest(text=text, sampling={"temperature": float("nan"), "seed": 3})
    yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*RARE, 2**31]))
    yield pb.GenerateRequest(chat={"messages": [{"role": MARKER, "content": text}]})
    yield pb.GenerateRequest(chat={"messages": [{"role": "user", "content": text}]}, sampling={"max_tokens": 5})


def send(server: Running, request: pb.GenerateRequest, **options: Any) -> str:
    """Read the whole answer; return the details of the error, if any."""
    try:
        for _ in server.stub.Generate(request, metadata=(("x-note", MARKER),), **options):
            pass
    except grpc.RpcError as caught:
        error: Any = caught
        return str(error.details()) + str(error.trailing_metadata())
    return ""


def completions() -> list[str]:
    """Return texts and ids of the answers to some of these requests."""
    answers = [
        expected(TOKENIZER.encode(f"{MARKER} said the {MARKER}"), Sampling(seed=1, stop_ids=(0,)), 20, VOCABULARY)
    ]
    answers.append(expected(RARE, Sampling(seed=2, stop_ids=(0,)), 20, VOCABULARY))
    texts = [decode(TOKENIZER, answer, keep_special=False)[:12] for answer in answers]
    return [*texts, *(", ".join(map(str, answer[:4])) for answer in answers), ", ".join(map(str, RARE[:3]))]


def check(server: Running, *other_output: str) -> None:
    output = "".join([*map(str, list(server.lines)), *server.other, *other_output])
    found = [secret for secret in (MARKER, *completions()) if secret in output]
    assert found == []


@pytest.mark.parametrize("fault", ["exit", "exception", "memory", "tokens"])
def test_logs_of_worker_failures_have_no_content(start: Callable[..., Running], tmp_path: Path, fault: str) -> None:
    server = start(fault=fault, fault_step=12, fault_once=str(tmp_path / "once"))
    refused = [send(server, request) for request in everything_wrong()]
    assert sum(map(bool, refused)) >= 5
    call = server.stub.Generate(endless())
    next(call)
    call.cancel()
    send(server, next(everything_wrong()), timeout=0.001)
    neighbour = send(server, endless(9))
    server.popen.send_signal(signal.SIGUSR1)
    until(lambda: any("most recent call first" in line for line in list(server.other)))
    stats = server.stub.GetStats(pb.GetStatsRequest())
    model = server.stub.GetModel(pb.GetModelRequest())
    figures = server.metrics_page()
    assert "lineclear_requests_finished_total" in figures
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert any(line["event"] == "request_ended" for line in server.lines)
    check(server, neighbour, str(stats), str(model), figures)


@pytest.mark.parametrize(
    "part", ["text.detokenizer.AnswerText.push", "text.tokenizer.Tokenizer.encode", "core.scheduler.Scheduler.apply"]
)
def test_logs_of_bugs_have_no_content(start: Callable[..., Running], part: str) -> None:
    """A component raises an exception whose text, cause and arguments have request content."""
    module, cls, method = part.rsplit(".", 2)
    broken = RUN.replace(
        "sys.exit",
        f"from lineclear.scheduler.{module} import {cls}\n"
        "def broken(*args, **more):\n"
        f"    secret = '{MARKER} {RARE[0]}, {RARE[1]}, {RARE[2]}'\n"
        "    raise RuntimeError(secret, args) from ValueError(secret)\n"
        f"{cls}.{method} = broken\nsys.exit",
    )
    server = start(code=broken)
    for request in list(everything_wrong())[:2]:
        error = send(server, request)
        assert MARKER not in error
    server.popen.send_signal(signal.SIGTERM)
    server.exit_code()
    check(server)


CARELESS = """
import structlog
from prometheus_client.core import GaugeMetricFamily
from lineclear.scheduler import metrics_export
from lineclear.scheduler.requests.validate import request as validation
texts = {}
figures, real = metrics_export.families, validation.check
def families(*arguments, **named):
    yield from figures(*arguments, **named)
    family = GaugeMetricFamily("lineclear_asked", "How often.", labels=["prompt"])
    for text, count in texts.items():
        family.add_metric([text], count)
    yield family
def check(request, bounds):
    structlog.get_logger().info("request", prompt=request.text)
    texts[request.text] = texts.get(request.text, 0) + 1
    return real(request, bounds)
metrics_export.families, validation.check = families, check
"""


def test_marker_is_found_when_logged(start: Callable[..., Running]) -> None:
    """With a server that writes prompts to its log and its metrics."""
    server = start(code=RUN.replace("sys.exit", f"{CARELESS}\nsys.exit"))
    send(server, next(everything_wrong()))
    with pytest.raises(AssertionError, match=MARKER):
        check(server)
    page = server.metrics_page()
    server.lines.clear()
    with pytest.raises(AssertionError, match=MARKER):
        check(server, page)
