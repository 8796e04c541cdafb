"""Answers that never stop being asked for, each compared token by token with the only right one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lineclear.client import Client, Sampling
from lineclear.errors import LineclearError


@dataclass(frozen=True)
class Question:
    """A request and its answer."""

    prompt: tuple[int, ...]
    sampling: Sampling
    right: tuple[int, ...]


@dataclass
class Tally:
    """What came of the answers. Written by many threads, under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: int = 0
    tokens: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    resumes: int = 0
    failed: Counter[str] = field(default_factory=Counter)


class Reader(threading.Thread):
    """Asks one question after another until told to stop, each to its end."""

    def __init__(self, client: Client, ask: Callable[[], Question], tally: Tally) -> None:
        super().__init__(daemon=True)
        self.num_tokens = 0
        """So far, over all answers."""
        self.last_at = 0.0
        """When the last token came."""
        self._client, self._ask, self._tally = client, ask, tally
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Finish the answer in progress, and no further one."""
        self._stopped.set()

    def run(self) -> None:
        """Read."""
        while not self._stopped.is_set():
            question = self._ask()
            tokens: list[int] = []
            duplicated = lost = 0
            error = ""
            try:
                with self._client.stream(list(question.prompt), question.sampling, omit_text=True) as stream:
                    for delta in stream:
                        duplicated += max(0, len(tokens) - delta.first_index)
                        lost += max(0, delta.first_index - len(tokens))
                        tokens += delta.token_ids
                        self.num_tokens += len(delta.token_ids)
                        if delta.token_ids:
                            self.last_at = time.monotonic()
                resumes = stream.resumes
            except LineclearError as failure:
                error, resumes = failure.reason, 0
            self._count(question, tokens, error, lost, duplicated, resumes)

    def _count(
        self, question: Question, tokens: Sequence[int], error: str, lost: int, duplicated: int, resumes: int
    ) -> None:
        tally = self._tally
        with tally.lock:
            tally.answers += 1
            tally.tokens += len(tokens)
            tally.resumes += resumes
            tally.duplicated += duplicated + max(0, len(tokens) - len(question.right))
            tally.altered += sum(a != b for a, b in zip(tokens, question.right, strict=False))
            if error:
                tally.failed[error] += 1
            else:
                tally.lost += lost + max(0, len(question.right) - len(tokens))
