"""An idle client: read one answer after another and measure the gaps between its messages.

cd tests && python -m fuzz.canary TARGET MAX_ATTEMPTS [TOKEN]

Run until standard input ends. Then print JSON: the gaps in seconds, and the longest time without a token, including the
time to the first one. Fail if an answer fails or differs from the first one. It runs in its own process, so that load
in the test's process does not delay it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from support.time_limits import PATIENCE_SECONDS

from lineclear.client import Client

TOKENS = 100


class Canary:
    """A canary process beside the block."""

    def __init__(self, target: str, token: str = "", max_attempts: int = 1) -> None:
        self._command = [sys.executable, "-m", "fuzz.canary", target, str(max_attempts), *([token] if token else [])]
        self.right: list[int] = []
        """The tokens of each answer."""
        self.first_seconds: list[float] = []
        """How long each answer waited for its first token, from `end` on."""

    def __enter__(self) -> Self:
        pipe, folder = subprocess.PIPE, Path(__file__).parents[1]
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, cwd=folder)
        assert self._process.stdout is not None
        self.right = json.loads(self._process.stdout.readline())  # its first answer is complete
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def end(self) -> tuple[list[float], float]:
        """Stop the canary. Return its gaps and the longest time without a token, in seconds."""
        output, _ = self._process.communicate(b"", PATIENCE_SECONDS)
        assert self._process.returncode == 0, "the canary's answer failed or differed"
        found = json.loads(output)
        self.first_seconds = found["firsts"]
        return found["gaps"], found["longest"]


def main() -> int:
    ended, firsts, gaps, longest = threading.Event(), list[float](), list[float](), 0.0
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    target, max_attempts, *token = sys.argv[1:]
    with Client(target, token=token[0] if token else None, max_attempts=int(max_attempts), sessions=False) as client:
        client.generate([5, 6], max_tokens=1, seed=1)
        right = client.generate([5, 6], max_tokens=TOKENS, ignore_eos=True, seed=1)
        print(json.dumps(right.token_ids), flush=True)
        while not gaps or not ended.is_set():
            asked, times = time.perf_counter(), list[float]()
            with client.stream([5, 6], max_tokens=TOKENS, ignore_eos=True, seed=1) as stream:
                for delta in stream:
                    if delta.token_ids:
                        times.append(time.perf_counter())
            if (stream.result.token_ids, stream.result.text) != (right.token_ids, right.text):
                return 1
            firsts.append(times[0] - asked)
            gaps += [b - a for a, b in pairwise(times)]
            longest = max([longest, *(b - a for a, b in pairwise((asked, *times)))])
    print(json.dumps({"firsts": firsts, "gaps": gaps, "longest": longest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
