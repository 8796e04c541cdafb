"""Who may still join the queue, and when it is worth asking again: counts by request, by token and by tenant.

How fast the queue moves says both when to come back and who had better not wait: see `retry_after_seconds` and
`least_wait_seconds`.

Kept on the event loop, so that a refusal costs neither a tokenizer nor the engine; the core has bounds of its own,
which are the same and hold whatever is counted here. Decides nothing about who is next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lineclear.errors import DeadlineUnreachable, QueueFull

_RATE_SECONDS = 10
_UNKNOWN_SECONDS = 1.0  # said when nobody has left the queue lately
# So long the queue must have been there, and so many have begun, for its pace to be the server's and not the callers'.
_LEAST_BUSY_SECONDS, _LEAST_BEGAN = 3, 16
# A queue may run faster than it did. At half load this let one in 400,000 be refused who would have begun in time.
_MAX_PACE_RATIO = 3.0
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 60.0


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Most requests waiting and most prompt tokens of theirs; 0 is no limit for a single tenant."""

    requests: int
    tokens: int
    requests_per_tenant: int = 0
    tokens_per_tenant: int = 0
    reject_unmeetable_deadlines: bool = False
    """Whoever's deadline would pass before he begins."""


class QueueQuota:
    """The requests between the door and their first step. A tenant that has none waiting is forgotten."""

    def __init__(self, limits: QuotaLimits, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._limits = limits
        self._clock = clock
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._num_requests = self._num_tokens = 0
        self._busy_since = 0.0  # when somebody came and nobody waited
        self._left: deque[tuple[int, int, int]] = deque()  # (second, requests, tokens) of those that began

    def __len__(self) -> int:
        return self._num_requests

    @property
    def num_tenants(self) -> int:
        """Those that have somebody waiting."""
        return len(self._requests)

    def reserve(self, tenant: str, seconds: float = math.inf) -> None:
        """One more, of unknown length, who can wait for `seconds`. Raises QueueFull or DeadlinePredicted."""
        limits, mine = self._limits, self._requests.get(tenant, 0)
        if self._num_requests >= limits.requests:
            self._refuse(f"{self._num_requests} requests are waiting", "", self._num_requests, limits.requests)
        if self._num_requests and self._num_tokens >= limits.tokens:
            self._refuse_tokens(self._num_tokens, limits.tokens)
        if limits.requests_per_tenant and mine >= limits.requests_per_tenant:
            self._refuse(f"{mine} requests of this tenant are waiting", "_of_tenant", mine, limits.requests_per_tenant)
        if limits.reject_unmeetable_deadlines and seconds < (wait := self.min_wait_seconds()):
            self.num_refused += 1
            raise DeadlineUnreachable(
                f"{self._num_requests} requests are waiting; the deadline, in {seconds:.1f} s, would pass in the queue",
                metadata={"waiting": str(self._num_requests), "least_wait_seconds": f"{wait:.1f}"},
            )
        if self._num_requests == 0:
            self._busy_since = self._clock()
        self._num_requests += 1
        self._requests[tenant] = mine + 1

    def add_tokens(self, tenant: str, tokens: int) -> None:
        """Its length is known now. Raises QueueFull. A single request may be longer than all may be together."""
        limits, mine = self._limits, self._tokens.get(tenant, 0)
        if self._num_tokens and self._num_tokens + tokens > limits.tokens:
            self._refuse_tokens(self._num_tokens, limits.tokens)
        if limits.tokens_per_tenant and mine and mine + tokens > limits.tokens_per_tenant:
            what = f"{mine} prompt tokens of this tenant are waiting"
            self._refuse(what, "_tokens_of_tenant", mine, limits.tokens_per_tenant)
        self._num_tokens += tokens
        self._tokens[tenant] = mine + tokens

    def release(self, tenant: str, tokens: int, *, began: bool) -> None:
        """It waits no longer: it `began`, or is over."""
        self._num_requests -= 1
        self._num_tokens -= tokens
        for counts, count in ((self._requests, 1), (self._tokens, tokens)):
            counts[tenant] = counts.get(tenant, 0) - count
            assert counts[tenant] >= 0, "left twice"
            if counts[tenant] == 0:
                del counts[tenant]
        if began:
            self._record_departure(tokens)

    def retry_after_seconds(self) -> float:
        """When half of those that wait now will have begun, going by the last ten seconds.

        Half, so that those who come back then find room and the queue is not empty yet.
        """
        self._expire_window()
        requests, tokens = (sum(entry[part] for entry in self._left) for part in (1, 2))
        if not requests:
            return _UNKNOWN_SECONDS
        covered = min(self._clock() - self._left[0][0] + 1.0, float(_RATE_SECONDS))
        ahead = max(self._num_requests / requests, self._num_tokens / tokens if tokens else 0.0)
        return min(max(ahead * covered / 2, _LEAST_SECONDS), _MOST_SECONDS)

    def min_wait_seconds(self) -> float:
        """How long who comes now waits at least, at three times the pace of those whole seconds in which the queue was
        never empty; 0 while there are too few to say."""
        self._expire_window()
        now = self._clock()
        begin = max(int(self._busy_since) + 1, int(now) - _RATE_SECONDS)
        began = sum(requests for second, requests, _ in self._left if second >= begin)
        if not self._num_requests or now - begin < _LEAST_BUSY_SECONDS or began < _LEAST_BEGAN:
            return 0.0
        return self._num_requests * (now - begin) / began / _MAX_PACE_RATIO

    def _record_departure(self, tokens: int) -> None:
        second = int(self._clock())
        if self._left and self._left[-1][0] == second:
            _, before, tokens_before = self._left.pop()
            self._left.append((second, before + 1, tokens_before + tokens))
        else:
            self._left.append((second, 1, tokens))
        self._expire_window()

    def _expire_window(self) -> None:
        now = self._clock()
        while self._left and self._left[0][0] <= now - _RATE_SECONDS - 1:
            self._left.popleft()

    def _refuse_tokens(self, waiting: int, limit: int) -> None:
        self._refuse(f"{waiting} prompt tokens are waiting", "_tokens", waiting, limit)

    def _refuse(self, what: str, suffix: str, waiting: int, limit: int) -> None:
        self.num_refused += 1
        seconds = self.retry_after_seconds()
        raise QueueFull(
            f"{what}, the limit is {limit}; retry in about {seconds:.1f} s",
            retry_after_seconds=seconds,
            metadata={f"waiting{suffix}": str(waiting), f"limit{suffix}": str(limit)},
        )
