"""The real scheduler as a process with a toy worker, which tests can kill and restart.

Without torch it is ready in about a second. `answer` computes its answers.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.processes import EOS as EOS
from support.processes import RUN, start_process, worker_flags
from support.processes import TOKENIZER as TOKENIZER
from support.processes import VOCABULARY as VOCABULARY
from support.small_tokenizers import byte_level, save
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected

from lineclear.client import Client, HealthStatus
from lineclear.errors import LineclearError
from lineclear.scheduler.text.detokenizer import decode
from lineclear.wire.messages import Sampling

CODE = RUN
"""Python code that runs the scheduler."""


def answer(prompt: Sequence[int], max_tokens: int, *, model: str = "", **sampling: Any) -> list[int]:
    """Return the tokens of the answer to `prompt`. End-of-sequence is ignored."""
    return expected(prompt, Sampling(**sampling), max_tokens, VOCABULARY, model)


def text_of(tokens: Sequence[int]) -> str:
    return decode(TOKENIZER, tokens, keep_special=False)


def wait_until_serving(client: Client, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the scheduler exited with {process.returncode}"
        with contextlib.suppress(LineclearError):
            if client.health(timeout_seconds=1.0) is HealthStatus.SERVING:
                return
        time.sleep(0.02)
    raise AssertionError(f"not ready within {PATIENCE_SECONDS} s")


class ToyService:
    """A scheduler at `target`, by default a Unix socket in `folder`, that can be started and stopped repeatedly."""

    def __init__(
        self, folder: Path, *flags: str, target: str | None = None, log: Path | None = None, **toy: Any
    ) -> None:
        """With `log`, both processes write their standard error to that file."""
        self.target = target or f"unix:{folder}/api.sock"
        model = save(folder / "model", byte_level())
        self._flags = ["--model", str(model), *worker_flags(), "--listen", self.target, "--log-level", "error"]
        self._flags += ["--log-format", "json", *flags]
        self._toy, self._log = toy, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        with self._log.open("ab") if self._log is not None else contextlib.nullcontext() as log:
            self._process = start_process(self._flags, CODE, toy=self._toy, stderr=log)
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        assert self._process is not None
        with Client(self.target, max_attempts=1) as client:
            wait_until_serving(client, self._process)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self) -> int:
        """Stop the scheduler with SIGTERM. Return its exit code."""
        return self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        return process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def toy_service(
    folder: Path, *flags: str, target: str | None = None, log: Path | None = None, **toy: Any
) -> Iterator[ToyService]:
    """Run a ready ToyService, and kill it at the end of the block."""
    service = ToyService(folder, *flags, target=target, log=log, **toy)
    try:
        service.start()
        yield service
    finally:
        service.kill()
