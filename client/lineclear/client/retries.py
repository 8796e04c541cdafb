"""Whether a call that failed is tried again, and when. Pure but for the clock and the dice it is given.

Only what failed before its first response may come here: what was half answered is never asked twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from lineclear.errors import DeadlineExceeded, LineclearError, Unreachable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently. `max_attempts` counts the first one: 1 switches retrying off.

    The n-th pause is drawn from the upper half of `first_pause_seconds * 2**n`, which never exceeds
    `max_pause_seconds`; a server that names a longer pause gets it, plus up to half of that draw again so that callers
    refused together do not come back together.
    """

    max_attempts: int = 4
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1, which means no retries")


def may_retry(error: LineclearError) -> bool:
    """Nobody answered, or somebody did and named the pause after which to try again."""
    if isinstance(error, Unreachable):
        return True
    return error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and error.retry_after_seconds is not None


class Attempts:
    """The attempts of one call and the time they have together."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._deadline = None if timeout_seconds is None else clock() + timeout_seconds
        self._failed = 0

    def begin(self) -> float | None:
        """The seconds an attempt has that begins now; None is no limit. Raises DeadlineExceeded if there are none."""
        remaining = self._remaining_seconds()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the deadline of the call passed before it was sent")
        return remaining

    def pause_after(self, error: LineclearError) -> float:
        """Seconds to wait before the next attempt. Raises `error` when there is to be none."""
        self._failed += 1
        if self._failed >= self._policy.max_attempts or not may_retry(error):
            raise error
        ceiling = min(self._policy.first_pause_seconds * 2.0 ** (self._failed - 1), self._policy.max_pause_seconds)
        pause = ceiling * (1 + self._uniform()) / 2
        asked = error.retry_after_seconds
        if asked is not None and asked > pause:
            pause = asked + ceiling * self._uniform() / 2
        remaining = self._remaining_seconds()
        if remaining is not None and pause >= remaining:
            raise error  # the true cause says more than a deadline missed by waiting for it
        return pause

    def _remaining_seconds(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._clock()
