"""When a failed call is retried and an interrupted answer is resumed.

`RetryState` counts the attempts of a call that the server did not accept. `ResumeState` counts the resumes of an
answer; they continue at the next token. No I/O; clock and randomness are arguments.
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

from .message_fields import seconds, whole

MAX_TIMEOUT_SECONDS = 366 * 86_400.0
"""Longest time a call may have; a later deadline is brought forward to this."""

log = logging.getLogger("lineclear")
"""Logs retries and resumes, never prompts or answers."""
log.addHandler(logging.NullHandler())  # else Python prints warnings of a program that does not log


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and for how long a client retries calls and resumes answers. The deadline of the call bounds it all.

    Args:
        max_attempts: attempts, the first included, if the queue is full or the server was never reachable. 1 disables
            all retries and resumes.
        first_pause_seconds: ceiling of the first pause. It doubles with every attempt.
        max_pause_seconds: largest ceiling. A retry waits for the upper half of the ceiling, chosen at random, or as
            long as the server asks plus up to half of the ceiling. A resume waits for a random part of the ceiling.
        max_resumes: resumes in a row without a new token, and restarts after a change of the model. 0 disables both.
        resume_timeout_seconds: how long a server that was reachable before may be unreachable, and how long an answer
            may have no new token. The number of attempts does not count then.
        start_timeout_seconds: how long a server may report that it is starting. It is loading the model.
        max_replicas: how many more replicas are asked if one serves another model than that of the answer, as
            during a rolling update. For targets that stand for several servers.
    """

    max_attempts: int = 4
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0
    max_resumes: int = 64
    resume_timeout_seconds: float = 60.0
    start_timeout_seconds: float = 600.0
    max_replicas: int = 16

    def __post_init__(self) -> None:
        for name, low in (("max_attempts", 1), ("max_resumes", 0), ("max_replicas", 0)):
            whole(name, getattr(self, name), low)
        for name in ("first_pause_seconds", "max_pause_seconds", "resume_timeout_seconds", "start_timeout_seconds"):
            if seconds(name, getattr(self, name)) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 0")


@dataclass(frozen=True, slots=True)
class RetryWait:
    """The pause before a retry or a resume: its cause, its length and the rest of the limits."""

    error: LineclearError
    pause_seconds: float
    waited_seconds: float
    """Seconds since the first failure in a row."""
    left_seconds: float | None
    """Seconds until the client gives up; None if attempts and the deadline are the only limits."""
    left_attempts: int | None


OnWait: TypeAlias = Callable[[RetryWait], None]


def may_retry(error: LineclearError) -> bool:
    """Return whether a call that the server did not accept may be retried.

    That is if no server answered, or if the server named a pause. An infinite pause means never.
    """
    if error.retry_after_seconds == math.inf:
        return False
    if isinstance(error, Unreachable):
        return True
    return error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and error.retry_after_seconds is not None


def is_absence(error: LineclearError) -> bool:
    """Return whether a server that was reachable before is unavailable. A plain Unreachable may be a wrong address."""
    return error.code == "UNAVAILABLE" and type(error) is not Unreachable


def may_resume(error: LineclearError, resumed: bool) -> bool:
    """Return whether an answer that ended with `error` may be resumed.

    `resumed`: the error is that of a resume. It may be refused because the queue is full, or because the server still
    has the first call.
    """
    if error.retry_after_seconds == math.inf:
        return False
    if error.code == "UNAVAILABLE":
        return True
    return resumed and (isinstance(error, DuplicateRequest) or may_retry(error))


def bounded(timeout_seconds: float | None) -> float | None:
    """Return a timeout that gRPC and the clocks can add to the time of day: at most a year.

    Raises ValueError for other values than numbers.
    gRPC itself ends a call at once whose deadline is some years ahead.
    """
    if timeout_seconds is None:
        return None
    return min(seconds("timeout_seconds", timeout_seconds), MAX_TIMEOUT_SECONDS)


class _WaitBudget:
    """How long a server has been unavailable, and how long it has been starting."""

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Record that the server is available."""
        self._away_since: float | None = None
        self._starting_since: float | None = None

    def left_seconds(self, error: LineclearError) -> float:
        """Return the seconds until the client gives up, given one more `error`. Raises `error` if none are left."""
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
    """The attempts of one call and their common deadline.

    `meets_own_request`: after a lost connection, DuplicateRequest means the earlier attempt, which the server has not
    ended yet. False for Submit, whose requests outlive the connection. `on_wait` is called before every pause.
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
        self.policy = policy
        self.clock = clock
        self.uniform = uniform
        self._meets_own_request = meets_own_request
        self._on_wait = on_wait
        self._was_lost = False
        timeout_seconds = bounded(timeout_seconds)
        self._deadline = None if timeout_seconds is None else clock() + timeout_seconds
        self._failed = 0
        self._failing_since = math.inf
        self._refused = 0
        self._wait_budget = _WaitBudget(policy, clock)

    def begin(self) -> float | None:
        """Return the seconds left for an attempt, None without a deadline. Raises DeadlineExceeded if none are left."""
        remaining = self._remaining_seconds()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the deadline of the call passed before it was sent")
        return remaining

    def pause_after(self, error: LineclearError) -> float:
        """Return the seconds before the next attempt. Raises `error` if no further attempt is allowed."""
        self._failed += 1
        self._failing_since = min(self._failing_since, self.clock())
        self._was_lost = self._was_lost or isinstance(error, ConnectionLost)
        own_request = self._meets_own_request and self._was_lost and isinstance(error, DuplicateRequest)
        if self.policy.max_attempts == 1 or not (own_request or may_retry(error)):
            raise error
        left_seconds, left_attempts = self._left(error, is_absence(error) or own_request)
        ceiling = _ceiling(self.policy, self._failed - 1)
        pause = ceiling * (1 + self.uniform()) / 2
        asked = error.retry_after_seconds
        if asked is not None and asked > pause:
            pause = asked + ceiling * self.uniform() / 2
        wait = RetryWait(error, pause, self.clock() - self._failing_since, left_seconds, left_attempts)
        granted = self.granted(wait)
        log.info("a call was not accepted (%s); attempt %d in %.3f s", error.reason, self._failed + 1, granted)
        return granted

    def _left(self, error: LineclearError, absent: bool) -> tuple[float | None, int | None]:
        if absent:
            return self._wait_budget.left_seconds(error), None
        self._wait_budget.reset()
        self._refused += 1
        if self._refused >= self.policy.max_attempts:
            raise error
        return None, self.policy.max_attempts - self._refused

    def granted(self, wait: RetryWait) -> float:
        """Return the pause of `wait`. Raises its error if the deadline of the call is earlier."""
        remaining = self._remaining_seconds()
        if remaining is not None and wait.pause_seconds >= remaining:
            raise wait.error  # it says more than DeadlineExceeded would
        if self._on_wait is not None:
            if remaining is not None and wait.left_seconds is not None:
                wait = replace(wait, left_seconds=min(wait.left_seconds, remaining))
            self._on_wait(wait)
        return wait.pause_seconds

    def has_time_for(self, pause_seconds: float) -> bool:
        """Return whether the deadline is later than that."""
        remaining = self._remaining_seconds()
        return remaining is None or pause_seconds < remaining

    def _remaining_seconds(self) -> float | None:
        return None if self._deadline is None else self._deadline - self.clock()


class ResumeState:
    """The resumes of one answer, the replicas asked for them, and the time since its last token."""

    def __init__(self, attempts: RetryState) -> None:
        self.count = 0
        """Resumes so far."""
        self._attempts = attempts
        self._policy = attempts.policy
        self._wait_budget = _WaitBudget(attempts.policy, attempts.clock)
        self._restarts = 0
        self.on_progress()

    def on_progress(self) -> None:
        """Record a new part of the answer."""
        self._wait_budget.reset()
        self._num_failed = self._without_progress = self._replicas_asked = 0
        self._failing_since = math.inf

    def pause_after(self, error: LineclearError, *, restarts: bool = False) -> float:
        """Return the seconds before the next resume or restart. Raises `error` if none is allowed."""
        policy, clock = self._policy, self._attempts.clock
        was_cut = not isinstance(error, ServerStarting)  # a starting server has not resumed the answer
        is_spent = self._restarts >= policy.max_resumes if restarts else was_cut and self._are_spent
        allowed = policy.max_attempts > 1 and policy.max_resumes > 0 and not is_spent
        if not allowed or not (restarts or may_resume(error, self._num_failed > 0)):
            raise error
        left_seconds = self._wait_budget.left_seconds(error)
        self._failing_since = min(self._failing_since, clock())
        self._count(was_cut)
        self._restarts += restarts
        pause = (error.retry_after_seconds or 0.0) + _ceiling(policy, self._num_failed) * self._attempts.uniform()
        self._num_failed += 1
        granted = self._attempts.granted(RetryWait(error, pause, clock() - self._failing_since, left_seconds, None))
        log.warning("an answer was interrupted (%s); resume %d in %.3f s", error.reason, self.count, granted)
        return granted

    def pause_before_replica(self, was_cut: bool) -> float | None:
        """Return the seconds before the next replica is asked for the model, None if the answer ends instead.

        gRPC sends each call to the next replica in turn, and refusing a call is cheap. So the pauses do not grow.
        `was_cut`: the answer was interrupted. A refused resume is counted already.
        """
        policy = self._policy
        pause = policy.first_pause_seconds * self._attempts.uniform()
        is_over = self._replicas_asked >= policy.max_replicas or policy.max_attempts == 1
        if is_over or (was_cut and self._are_spent) or not self._attempts.has_time_for(pause):
            return None
        self._replicas_asked += 1
        self._count(was_cut)
        log.info("the replica serves another model; the next one is asked in %.3f s", pause)
        return pause

    @property
    def _are_spent(self) -> bool:
        return self._without_progress >= self._policy.max_resumes

    def _count(self, was_cut: bool) -> None:
        self.count += was_cut
        self._without_progress += was_cut


def _ceiling(policy: RetryPolicy, num_failed: int) -> float:
    """Return the largest pause after this number of failures."""
    return min(policy.first_pause_seconds * 2.0 ** min(num_failed, 30), policy.max_pause_seconds)
