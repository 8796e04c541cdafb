"""Whether a call that failed is tried again, or an answer that was cut off is resumed, and when.

Pure but for the clock, the dice and the listener it is given. What was half answered is never asked from the beginning:
`Attempts` is for calls that were not taken, `Resumptions` for answers, which go on at the index they were cut off at.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from lineclear.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DuplicateRequest,
    LineclearError,
    ServerStarting,
    Unreachable,
)

MAX_TIMEOUT_SECONDS = 366 * 86_400.0
"""Longest time a call may have; a later deadline is brought forward to this."""

log = logging.getLogger("lineclear")
"""Of the client: calls that are made again, answers that are resumed. Reasons and figures, never content."""
log.addHandler(logging.NullHandler())  # else Python prints warnings of a program that does not log


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently. `max_attempts` 1 switches all of it off.

    A server that was there and is not is waited for: with as many attempts as that takes, until it has been away for
    `resume_timeout_seconds`. One that says that it is starting is not away, and loading a large model takes its time:
    it gets `start_timeout_seconds`. So a request that waited in its queue outlives its restart. One that has no room,
    and an address where nobody has answered yet, are tried `max_attempts` times, the first one included.

    The n-th pause is drawn from the upper half of `first_pause_seconds * 2**n`, which never exceeds
    `max_pause_seconds`; a server that names a longer pause gets it, plus up to half of that draw again so that callers
    refused together do not come back together. One that asks not to be asked again is not.

    An answer that is cut off (the server left, died or cannot be reached) is resumed: as often as that happens, as
    long as something new of it comes in between. It is given up after `max_resumes` in a row without, or when it has
    got nothing new for `resume_timeout_seconds`, the starting of a server aside. The pause before is drawn from all of
    the same ceiling. An answer that is to start over where the model changed does so at most `max_resumes` times. 0,
    or `max_attempts` 1, switches all of this off.

    Behind a name there may be many servers, and during a rolling update not all have the same model. Where one has
    another model than the answer, up to `max_replicas` more calls look for a server that can go on.

    The deadline of the call bounds everything together.
    """

    max_attempts: int = 4
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0
    max_resumes: int = 64
    resume_timeout_seconds: float = 60.0
    start_timeout_seconds: float = 600.0
    max_replicas: int = 16

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1, which means no retries")
        if self.max_resumes < 0:
            raise ValueError("max_resumes must not be negative; 0 means that answers are not resumed")
        if self.max_replicas < 0:
            raise ValueError("max_replicas must not be negative; 0 means that no other server is asked")


@dataclass(frozen=True, slots=True)
class RetryWait:
    """A call is about to pause, and to be made again: why, and how long this has been and may be going on."""

    error: LineclearError
    pause_seconds: float
    waited_seconds: float
    """Since the first failure in a row."""
    left_seconds: float | None
    """For which the server is still waited for; None where not time but attempts and the deadline bound it."""
    left_attempts: int | None


OnWait: TypeAlias = Callable[[RetryWait], None]


def may_retry(error: LineclearError) -> bool:
    """Nobody answered, or somebody did and named the pause after which to try again. An endless one means never."""
    if error.retry_after_seconds == math.inf:
        return False
    if isinstance(error, Unreachable):
        return True
    return error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and error.retry_after_seconds is not None


def is_absence(error: LineclearError) -> bool:
    """A server is known to be there, and is not at the moment. A plain Unreachable may be a wrong address."""
    return error.code == "UNAVAILABLE" and type(error) is not Unreachable


def may_resume(error: LineclearError, resumed: bool) -> bool:
    """Whether another server, or the same one later, can go on with an answer that ended like this.

    `resumed`: the error is that of an attempt to go on, which may also be refused for want of room, or because the
    server has not noticed yet that the first call is gone.
    """
    if error.retry_after_seconds == math.inf:
        return False
    if error.code == "UNAVAILABLE":
        return True
    return resumed and (isinstance(error, DuplicateRequest) or may_retry(error))


def bounded(timeout_seconds: float | None) -> float | None:
    """Return a timeout that gRPC and the clocks can add to the time of day: at most a year. Raises ValueError for NaN.

    gRPC itself ends a call at once whose deadline is some years ahead.
    """
    if timeout_seconds is None:
        return None
    if math.isnan(timeout_seconds):
        raise ValueError("timeout_seconds is NaN; give a number of seconds, or None")
    return min(timeout_seconds, MAX_TIMEOUT_SECONDS)


class _Patience:
    """How long a server has been waited for that is away, and how long while it said that it is starting."""

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """It is there: whatever comes next is another absence."""
        self._away_since: float | None = None
        self._starting_since: float | None = None

    def left_seconds(self, error: LineclearError) -> float:
        """For how long it is still waited for, of which `error` has been heard now. Raises `error` if no longer."""
        now = self._clock()
        if isinstance(error, ServerStarting):
            self._away_since = None
            if self._starting_since is None:
                self._starting_since = now
            left = self._policy.start_timeout_seconds - (now - self._starting_since)
        else:
            if self._away_since is None:
                self._away_since = now
            left = self._policy.resume_timeout_seconds - (now - self._away_since)
        if left < 0:
            raise error
        return left


class RetryState:
    """The attempts of one call and the time they have together.

    `meets_own_request`: once a connection was lost, a name that is in use is that of the earlier attempt, whose end the
    server has not noticed yet. Not so where the server goes on without us (Submit). `on_wait` hears of every pause
    that is granted, on the thread that asks for it.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
        *,
        meets_own_request: bool = False,
        on_wait: OnWait | None = None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._meets_own_request = meets_own_request
        self._on_wait = on_wait
        self._was_lost = False
        timeout_seconds = bounded(timeout_seconds)
        self._deadline = None if timeout_seconds is None else clock() + timeout_seconds
        self._failed = 0
        self._failing_since = math.inf
        self._refused = 0
        self._patience = _Patience(policy, clock)

    def begin(self) -> float | None:
        """The seconds an attempt has that begins now; None is no limit. Raises DeadlineExceeded if there are none."""
        remaining = self._remaining_seconds()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the deadline of the call passed before it was sent")
        return remaining

    def pause_after(self, error: LineclearError) -> float:
        """Seconds to wait before the next attempt. Raises `error` when there is to be none."""
        self._failed += 1
        self._failing_since = min(self._failing_since, self._clock())
        self._was_lost = self._was_lost or isinstance(error, ConnectionLost)
        own_shadow = self._meets_own_request and self._was_lost and isinstance(error, DuplicateRequest)
        if self._policy.max_attempts == 1 or not (own_shadow or may_retry(error)):
            raise error
        left_seconds, left_attempts = self._left(error, is_absence(error) or own_shadow)
        ceiling = min(
            self._policy.first_pause_seconds * 2.0 ** min(self._failed - 1, 30), self._policy.max_pause_seconds
        )
        pause = ceiling * (1 + self._uniform()) / 2
        asked = error.retry_after_seconds
        if asked is not None and asked > pause:
            pause = asked + ceiling * self._uniform() / 2
        wait = RetryWait(error, pause, self._clock() - self._failing_since, left_seconds, left_attempts)
        granted = self.granted(wait)
        log.info("a call was not taken (%s); attempt %d follows in %.3f s", error.reason, self._failed + 1, granted)
        return granted

    def _left(self, error: LineclearError, absent: bool) -> tuple[float | None, int | None]:
        if absent:
            return self._patience.left_seconds(error), None
        self._patience.reset()
        self._refused += 1
        if self._refused >= self._policy.max_attempts:
            raise error
        return None, self._policy.max_attempts - self._refused

    def granted(self, wait: RetryWait) -> float:
        """The pause of `wait`, or its error raised where the call has no such time left."""
        remaining = self._remaining_seconds()
        if remaining is not None and wait.pause_seconds >= remaining:
            raise wait.error  # the true cause says more than a deadline missed by waiting for it
        if self._on_wait is not None:
            if remaining is not None and wait.left_seconds is not None:
                wait = replace(wait, left_seconds=min(wait.left_seconds, remaining))
            self._on_wait(wait)
        return wait.pause_seconds

    def has_time_for(self, pause_seconds: float) -> bool:
        """Whether the call goes on for longer than that."""
        remaining = self._remaining_seconds()
        return remaining is None or pause_seconds < remaining

    def _remaining_seconds(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._clock()


class ResumeState:
    """How often one answer was cut off, and how long it has been standing still."""

    def __init__(
        self,
        policy: RetryPolicy,
        attempts: RetryState,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.count = 0
        """Attempts to go on so far."""
        self._without_progress = 0
        self._restarts = 0
        self._policy = policy
        self._attempts = attempts
        self._clock = clock
        self._uniform = uniform
        self._patience = _Patience(policy, clock)
        self._in_vain = 0
        self._failing_since = math.inf

    def on_progress(self) -> None:
        """Something new of the answer came."""
        self._patience.reset()
        self._in_vain = self._without_progress = 0
        self._failing_since = math.inf

    @property
    def are_spent(self) -> bool:
        """Whether there is no further attempt before something new of the answer comes."""
        return self._without_progress >= self._policy.max_resumes

    def count_one(self) -> None:
        """Count an attempt."""
        self.count += 1
        self._without_progress += 1

    def pause_after(self, error: LineclearError, *, restarts: bool = False) -> float:
        """Seconds to wait before going on, or before a restart. Raises `error` when that is not to be."""
        policy = self._policy
        was_cut = not isinstance(error, ServerStarting)  # who says that he is starting has not gone on with the answer
        is_spent = self._restarts >= policy.max_resumes if restarts else was_cut and self.are_spent
        allowed = policy.max_attempts > 1 and policy.max_resumes > 0 and not is_spent
        if not allowed or not (restarts or may_resume(error, self._in_vain > 0)):
            raise error
        left_seconds = self._patience.left_seconds(error)
        self._failing_since = min(self._failing_since, self._clock())
        ceiling = min(policy.first_pause_seconds * 2.0 ** min(self._in_vain, 30), policy.max_pause_seconds)
        if was_cut:
            self.count_one()
        self._restarts += restarts
        self._in_vain += 1
        pause = (error.retry_after_seconds or 0.0) + ceiling * self._uniform()
        wait = RetryWait(error, pause, self._clock() - self._failing_since, left_seconds, None)
        granted = self._attempts.granted(wait)
        log.warning("an answer was cut off (%s); it is resumed in %.3f s, resume %d", error.reason, granted, self.count)
        return granted


class ReplicaSearch:
    """The search for a server of the model that an answer needs, among those behind one name.

    A call goes to the next server in turn, and it takes a server little to refuse it. So the pauses do not grow.
    """

    def __init__(self, policy: RetryPolicy, attempts: RetryState, uniform: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._attempts = attempts
        self._uniform = uniform
        self._asked = 0

    def reset(self) -> None:
        """Forget the servers that were asked: one that goes on was found."""
        self._asked = 0

    def pause_seconds(self) -> float | None:
        """Return the pause before the next server is asked, None if enough were, or the call has no time left."""
        pause = self._policy.first_pause_seconds * self._uniform()
        is_over = self._asked >= self._policy.max_replicas or self._policy.max_attempts == 1
        if is_over or not self._attempts.has_time_for(pause):
            return None
        self._asked += 1
        log.info("a server has another model; another one is asked in %.3f s", pause)
        return pause
