"""Limits of the request queue: by request, by prompt token and by tenant, and an estimate of the waiting time.

Counted on the event loop, so that a rejected request costs neither a tokenizer nor the engine. The core enforces the
same total limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lineclear.scheduler.core.limits import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, queue_full
from lineclear.scheduler.settings import SchedulerSettings

_WINDOW_SECONDS = 10
_UNKNOWN_SECONDS = 1.0  # retry hint while no request has started lately


@dataclass(slots=True, eq=False)
class QueuePlace:
    """One request's place in the queue, from its admission until all of its streams have started or ended."""

    _quota: QueueLimiter
    _tenant: str
    num_streams: int = 1
    """Streams that wait in the queue."""
    was_admitted: bool = False
    """The engine has queued the request."""
    _num_tokens: int = 0
    _has_started: bool = False
    _is_released: bool = False

    def admit(self) -> None:
        """Count the request: the engine has queued it. Further calls have no effect."""
        if not self.was_admitted:
            self.was_admitted = True
            self._quota.num_admitted += 1

    def leave(self, *, started: bool) -> None:
        """Note that one stream has started, or ended before. The last one frees the place."""
        self.num_streams -= 1
        self._has_started = self._has_started or started
        if self.num_streams == 0:
            self.release(started=self._has_started)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the prompt of a tokenized request. Further calls have no effect. Raises QueueFull.

        A prompt may exceed the token limit if no other request waits.
        """
        if self._num_tokens:
            return
        self._quota._add_tokens(self._tenant, num_tokens)
        self._num_tokens += num_tokens

    def release(self, *, started: bool) -> None:
        """Free the place: the request `started`, or ended before. Further calls have no effect."""
        if not self._is_released:
            self._is_released = True
            self._quota._release(self._tenant, self._num_tokens, started=started)


class QueueLimiter:
    """Counts of waiting requests. Tenants without waiting requests take no memory."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float]) -> None:
        self.num_admitted = 0
        """Requests that the engine has queued."""
        self.predicted_wait: Callable[[], float | None] = lambda: None
        """The predicted wait of a request at the end of the queue; None if unknown."""
        self.settings = settings
        self._clock = clock
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._num_requests = self._num_tokens = 0
        self._started: deque[tuple[int, int, int]] = deque()  # (second, requests, tokens)

    def __len__(self) -> int:
        return self._num_requests

    def tenants(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def reserve(self, tenant: str) -> QueuePlace:
        """Reserve a place for a request. Raises QueueFull."""
        limits, of_tenant = self.settings, self._requests.get(tenant, 0)
        if self._num_requests >= limits.max_queue_size:
            self._reject(f"{self._num_requests} requests are waiting", "", self._num_requests, limits.max_queue_size)
        if self._num_requests and self._num_tokens >= limits.max_queue_tokens:
            self._reject_tokens(self._num_tokens, limits.max_queue_tokens)
        if limits.max_queue_size_per_tenant and of_tenant >= limits.max_queue_size_per_tenant:
            message = f"{of_tenant} requests of this tenant are waiting"
            self._reject(message, "_of_tenant", of_tenant, limits.max_queue_size_per_tenant)
        self._num_requests += 1
        self._requests[tenant] = of_tenant + 1
        return QueuePlace(self, tenant)

    def _add_tokens(self, tenant: str, tokens: int) -> None:
        limits, of_tenant = self.settings, self._tokens.get(tenant, 0)
        if self._num_tokens and self._num_tokens + tokens > limits.max_queue_tokens:
            self._reject_tokens(self._num_tokens, limits.max_queue_tokens)
        if limits.max_queue_tokens_per_tenant and of_tenant and of_tenant + tokens > limits.max_queue_tokens_per_tenant:
            message = f"{of_tenant} prompt tokens of this tenant are waiting"
            self._reject(message, "_tokens_of_tenant", of_tenant, limits.max_queue_tokens_per_tenant)
        self._num_tokens += tokens
        self._tokens[tenant] = of_tenant + tokens

    def _release(self, tenant: str, tokens: int, *, started: bool) -> None:
        self._num_requests -= 1
        self._num_tokens -= tokens
        for counts, count in ((self._requests, 1), (self._tokens, tokens)):
            counts[tenant] = counts.get(tenant, 0) - count
            assert counts[tenant] >= 0, "a place was released twice"
            if counts[tenant] == 0:
                del counts[tenant]
        if started:
            self._record_start(tokens)

    def retry_after_seconds(self) -> float:
        """Return the time until half of the queue has started: a retry finds a free place before the queue is empty."""
        wait = self.predicted_wait()
        if wait is None:
            return self._observed_retry_seconds()
        return min(max(wait / 2, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _observed_retry_seconds(self) -> float:
        """Return the time until half of the queue has started, at the rate of the last ten seconds."""
        self._expire_window()
        requests, tokens = (sum(entry[part] for entry in self._started) for part in (1, 2))
        if not requests:
            return _UNKNOWN_SECONDS
        window_seconds = min(self._clock() - self._started[0][0] + 1.0, float(_WINDOW_SECONDS))
        ahead = max(self._num_requests / requests, self._num_tokens / tokens if tokens else 0.0)
        return min(max(ahead * window_seconds / 2, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _record_start(self, tokens: int) -> None:
        second = int(self._clock())
        if self._started and self._started[-1][0] == second:
            _, before, tokens_before = self._started.pop()
            self._started.append((second, before + 1, tokens_before + tokens))
        else:
            self._started.append((second, 1, tokens))
        self._expire_window()

    def _expire_window(self) -> None:
        now = self._clock()
        while self._started and self._started[0][0] <= now - _WINDOW_SECONDS - 1:
            self._started.popleft()

    def _reject_tokens(self, waiting: int, limit: int) -> None:
        self._reject(f"{waiting} prompt tokens are waiting", "_tokens", waiting, limit)

    def _reject(self, message: str, suffix: str, waiting: int, limit: int) -> None:
        figures = {f"waiting{suffix}": waiting, f"limit{suffix}": limit}
        raise queue_full(message, limit, figures, self.predicted_wait(), self._observed_retry_seconds())
