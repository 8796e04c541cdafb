"""The real scheduler as a process with a toy worker, which tests can kill and restart.

Without torch it is ready in about a second. `answer` computes its answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.engine_harness import ENVIRONMENT
from support.small_tokenizers import byte_level, definition, save
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected

from lineclear.client import Client, HealthStatus
from lineclear.errors import LineclearError
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.wire.messages import Sampling

VOCABULARY, EOS = 512, 0
PROGRAM: tuple[str, ...] = ("-m", "lineclear.scheduler.main")
"""Arguments of Python that run the scheduler."""
TOKENIZER = Tokenizer(definition(byte_level()))


def answer(prompt: Sequence[int], max_tokens: int, *, model: str = "", **sampling: Any) -> list[int]:
    """Return the tokens of the answer to `prompt`. End-of-sequence is ignored."""
    return expected(prompt, Sampling(**sampling), max_tokens, VOCABULARY, model)


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of `tokens`."""
    return decode(TOKENIZER, tokens, keep_special=False)


class ToyService:
    """A scheduler at `target`, by default a Unix socket in `folder`, that can be started and stopped repeatedly."""

    def __init__(
        self, folder: Path, *flags: str, target: str | None = None, log: Path | None = None, **toy: Any
    ) -> None:
        """With `log`, both processes write their standard error to that file."""
        self.target = target or f"unix:{folder}/api.sock"
        self._model = save(folder / "model", byte_level())
        self._flags = flags
        self._toy = {"vocab_size": VOCABULARY, **toy}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = log

    @property
    def pid(self) -> int:
        """Process id of the scheduler."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start the scheduler and, with `wait`, wait until it is ready."""
        worker = [f"--worker-command={sys.executable} -m support.toy_worker_command"]
        command = [sys.executable, *PROGRAM, "--model", str(self._model), "--spawn-worker"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LINECLEAR_")}
        environment |= {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "TOY_OPTIONS": json.dumps(self._toy)}
        flags = ["--listen", self.target, "--log-level", "error", "--log-format", "json", *self._flags]
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log.open("ab")) if self._log is not None else None
            self._process = subprocess.Popen(
                [*command, *worker, *flags], env=environment, stdin=subprocess.DEVNULL, stderr=log
            )
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until health is SERVING."""
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        with Client(self.target, max_attempts=1) as client:
            while time.monotonic() < deadline:
                assert self._process.poll() is None, f"the scheduler exited with {self._process.returncode}"
                with contextlib.suppress(LineclearError):
                    if client.health(timeout_seconds=1.0) is HealthStatus.SERVING:
                        return
                time.sleep(0.02)
        raise AssertionError(f"not ready within {PATIENCE_SECONDS} s")

    def kill(self) -> None:
        """Kill the scheduler and wait for its exit."""
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
