"""Run the scheduler as a process, with toy workers where a test names no other worker, and read its log.

torch, transformers, numpy and rich are blocked in it, so that importing them fails. So are the packages for traces
unless they are asked for.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.engine_harness import ENVIRONMENT
from support.small_tokenizers import byte_level, definition
from support.time_limits import PATIENCE_SECONDS
from support.waiting import eventually

from lineclear.errors import LineclearError
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.status_codec import TRAILER, from_trailer
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

VOCABULARY, EOS = 512, 0
BOUND_SECONDS = PATIENCE_SECONDS

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        traces = "" if "--otlp-traces-endpoint" in sys.argv else "opentelemetry"
        if name.split(".")[0] in ("torch", "transformers", "triton", "numpy", "rich", traces):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Blocked())
"""
RUN = WITHOUT_TORCH + "from lineclear.scheduler.main import main\nsys.exit(main(sys.argv[1:]))"
TOY_WORKER = (sys.executable, "-m", "support.toy_worker_command")
TOKENIZER = Tokenizer(definition(byte_level()))


def worker_flags(command: Sequence[str] = TOY_WORKER) -> list[str]:
    return ["--spawn-worker", f"--worker-command={shlex.join(command)}"]


def start_process(
    flags: Sequence[str], code: str = RUN, *, toy: Mapping[str, Any], variables: Mapping[str, str] = {}, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a scheduler by `code`. Only settings of `variables` are in its environment; `toy` is for its workers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LINECLEAR_")}
    environment |= {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"], **variables}
    environment["TOY_OPTIONS"] = json.dumps({"vocab_size": VOCABULARY, **toy})
    return subprocess.Popen(
        [sys.executable, "-c", code, *flags], env=environment, **{"stdin": subprocess.DEVNULL, **options}
    )


class Line(dict[str, Any]):
    """A line of the log."""

    read_at = 0.0


class Process:
    """A scheduler process and its output. A context manager: its exit kills the process."""

    def __init__(
        self,
        flags: Sequence[str],
        code: str = RUN,
        stdin: int = subprocess.DEVNULL,
        variables: Mapping[str, str] = {},
        **toy: Any,
    ) -> None:
        self.popen = start_process(flags, code, toy=toy, variables=variables, stdin=stdin, stderr=subprocess.PIPE)
        self.lines: list[Line] = []
        self.other: list[str] = []
        self._has_ended = False
        self._condition = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = None
            with self._condition:
                if isinstance(parsed, dict):
                    self.lines.append(Line(parsed))
                    self.lines[-1].read_at = time.monotonic()
                else:
                    self.other.append(line.decode())
                self._condition.notify_all()
        with self._condition:
            self._has_ended = True
            self._condition.notify_all()

    def logged(self, event: str, after: float = 0.0, **fields: Any) -> list[Line]:
        """Return the log lines of `event` with these fields that were read after a moment."""
        return [
            e
            for e in list(self.lines)
            if e.get("event") == event and e.read_at >= after and fields.items() <= e.items()
        ]

    def wait_for(self, event: str, count: int = 1, *, after: float = 0.0, **fields: Any) -> Line:
        """Return the count-th of the lines that `logged` returns. A process that exits before fails the test."""
        with self._condition:
            self._condition.wait_for(
                lambda: len(self.logged(event, after, **fields)) >= count or self._has_ended, BOUND_SECONDS
            )
            found = self.logged(event, after, **fields)
        assert len(found) >= count, f"no {event}: {self.state()}"
        return found[count - 1]

    def metrics_page(self) -> str:
        """Return the metrics page. The server must run with --metrics-listen."""
        address = self.wait_for("metrics_listening")["address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=BOUND_SECONDS) as page:
            return str(page.read().decode())

    def state(self) -> str:
        return f"{self.lines} {self.other}"

    def exit_code(self, seconds: float = BOUND_SECONDS) -> int:
        code = self.popen.wait(seconds)
        self._reader.join(BOUND_SECONDS)
        return code

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self._reader.join(BOUND_SECONDS)
        assert self.popen.stderr is not None
        self.popen.stderr.close()


class Running(Process):
    """A scheduler that listens and has a worker, with a client."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        code: str = RUN,
        demo: bool = False,
        stdin: int = subprocess.DEVNULL,
        worker_command: Sequence[str] = TOY_WORKER,
        **toy: Any,
    ) -> None:
        which = ["--demo"] if demo else ["--model", str(model)]
        common = ["--listen", "127.0.0.1:0", "--log-format", "json"]
        super().__init__([*which, *common, *worker_flags(worker_command), *flags], code, stdin, **toy)
        try:
            self.address = self.wait_for("listening")["address"]
            assert self.wait_for("serving")["address"] == self.address
        except BaseException:
            self.end()
            raise
        self.channel = grpc.insecure_channel(self.address)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        until(lambda: self.health.Check(health_pb2.HealthCheckRequest(service="readiness")).status == 1)

    def end(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        super().end()


until = eventually


def is_running(pid: int) -> bool:
    """Whether the process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def starting(model: Path, *flags: str) -> Iterator[Callable[..., Running]]:
    """Yield a function that starts schedulers with these flags and more. Kills all at the end of the block."""
    started: list[Running] = []

    def start_scheduler(*more: str, **options: Any) -> Running:
        started.append(Running(model, *flags, *more, **options))
        return started[-1]

    try:
        yield start_scheduler
    finally:
        for running in started:
            running.end()


def endless(seed: int = 1) -> pb.GenerateRequest:
    """Return a request that runs until the context is full; no token ends it."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]), sampling={"seed": seed, "max_tokens": 500, "ignore_eos": True}
    )


def error_of(call: Any) -> LineclearError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    return from_trailer(error.code().name, error.details(), dict(error.trailing_metadata()).get(TRAILER))
