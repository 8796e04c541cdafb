"""A step function that waits for permission, and a model whose answers depend on every token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from support.time_limits import PATIENCE_SECONDS

from lineclear.embedded import StepBatch


class Gate:
    """A step function that waits for permission: `calls` has the argument of each call."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.calls: list[Any] = []
        self._function = function
        self._called = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, argument: Any) -> Any:
        self.calls.append(argument)
        self._called.release()
        if not self._is_open:
            assert self._allowed.acquire(timeout=PATIENCE_SECONDS)
        return self._function(argument)

    def wait_for_call(self) -> Any:
        assert self._called.acquire(timeout=PATIENCE_SECONDS)
        return self.calls[-1]

    def allow(self) -> None:
        self._allowed.release()

    def open(self) -> None:
        self._is_open = True
        self._allowed.release(1000)


def next_token(context: Sequence[int]) -> int:
    """Return the token of the test model after `context`."""
    return (sum((i + 1) * t for i, t in enumerate(context)) + 7 * len(context)) % 97


def model(batch: StepBatch) -> list[int]:
    """Compute a step of the test model, from each row's context."""
    return [next_token(row.context) for row in batch.sampling_rows]


def alone(prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Return the answer of the test model to a prompt."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context))
    return tuple(context[len(prompt) :])
