"""The whole scheduler as a process with a toy worker behind it, that can be killed and started again where it was.

No torch, so it is ready in about a second. Answers are known beforehand: `answer`.
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

from service.small_tokenizers import byte_level, definition, save
from support.engine_harness import ENVIRONMENT
from support.time_limits import PATIENCE_SECONDS
from support.toy import expected

from lineclear.client import Client, HealthStatus
from lineclear.errors import LineclearError
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.wire.messages import Sampling

VOCABULARY, EOS = 512, 0
PROGRAM: tuple[str, ...] = ("-m", "lineclear.scheduler.main")
"""What Python runs as the scheduler."""
TOKENIZER = Tokenizer(definition(byte_level()))


def answer(prompt: Sequence[int], max_tokens: int, *, model: str = "", **sampling: Any) -> list[int]:
    """The tokens of the answer; end-of-sequence is ignored."""
    return expected(prompt, Sampling(**sampling), max_tokens, VOCABULARY, model)


def text_of(tokens: Sequence[int]) -> str:
    """What they say."""
    return decode(TOKENIZER, tokens, keep_special=False)


class ToyService:
    """At `target`, by default a unix socket below `folder`. Started, stopped and killed as often as one likes."""

    def __init__(
        self, folder: Path, *flags: str, target: str | None = None, log: Path | None = None, **toy: Any
    ) -> None:
        """With `log`, both processes write there what would go to standard error."""
        self.target = target or f"unix:{folder}/api.sock"
        self._model = save(folder / "model", byte_level())
        self._flags = flags
        self._toy = {"vocab_size": VOCABULARY, **toy}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = log

    @property
    def pid(self) -> int:
        """Of the scheduler."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Begin, and be ready on return unless told not to `wait`."""
        worker = ["--worker-command", sys.executable, "--worker-command=-m", "--worker-command", "service.toy_worker"]
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
        """Return when it says SERVING."""
        assert self._process is not None
        give_up = time.monotonic() + PATIENCE_SECONDS
        with Client(self.target, max_attempts=1) as client:
            while time.monotonic() < give_up:
                assert self._process.poll() is None, f"it ended with {self._process.returncode}"
                with contextlib.suppress(LineclearError):
                    if client.health(timeout_seconds=1.0) is HealthStatus.SERVING:
                        return
                time.sleep(0.02)
        raise AssertionError(f"not ready within {PATIENCE_SECONDS} s")

    def kill(self) -> None:
        """SIGKILL, and gone on return."""
        self._signal(signal.SIGKILL)

    def leave(self) -> int:
        """SIGTERM; the exit code."""
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
    """One that is ready, and killed at the end of the block if it still runs."""
    service = ToyService(folder, *flags, target=target, log=log, **toy)
    try:
        service.start()
        yield service
    finally:
        service.kill()
