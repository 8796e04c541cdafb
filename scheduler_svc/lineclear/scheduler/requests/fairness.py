"""How equally tenants are served that wait at the same time: Jain's index over their tokens by weight.

Only seconds in which at least two tenants have requests waiting count, and only those tenants: a tenant that asks for
little is not treated unfairly. In each second, the tokens by weight of a tenant are compared with their mean over the
tenants of that second. x of a tenant is the sum of its tokens, divided by the sum of these means over its own seconds:
1 for an equal share, also of a tenant that waited for a short time only. The index is (sum x)^2 / (n * sum x^2)
(Jain, Chiu, Hawe 1984). If the same tenants wait in all seconds, it is the index of their totals.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lineclear.scheduler.requests.request_context import RequestContext

_TICK_SECONDS = 1.0
_WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Shares:
    """`index` is 1 where all tenants get the same. `gap_tokens` is the largest difference between two tenants."""

    index: float = 1.0
    gap_tokens: float = 0.0


class FairnessWindow:
    """Served tokens by tenant in the last minute. On one event loop; a timer runs only while requests are live.

    `waiting()` returns the tenants with waiting requests, `live()` the live requests.
    """

    def __init__(
        self,
        waiting: Callable[[], Iterable[str]],
        live: Callable[[], Iterable[RequestContext]],
        weights: Mapping[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._waiting, self._live, self._weights, self._clock = waiting, live, weights, clock
        self._ticks: deque[tuple[float, dict[str, float]]] = deque()  # end of the second, tokens by weight
        self._served: Counter[str] = Counter()  # since the last tick, of requests that ended
        self._had_waiting: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Run the timer: a request is live."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._on_timer)

    def ended(self, request: RequestContext) -> None:
        """Count the tokens of a request since the last tick."""
        self._served[request.call.tenant] += request.take_served_tokens()

    def tick(self) -> None:
        for request in self._live():
            self._served[request.call.tenant] += request.take_served_tokens()
        waiting = frozenset(self._waiting())
        both = self._had_waiting & waiting
        self._had_waiting = waiting
        served, self._served = self._served, Counter()
        self._expire()
        if len(both) > 1:
            self._ticks.append((self._clock(), {t: served[t] / self._weights.get(t, 1.0) for t in both}))

    def shares(self) -> Shares:
        """Return the figures of the last minute."""
        self._expire()
        totals: dict[str, float] = {}
        means: dict[str, float] = {}
        for _, tick in self._ticks:
            mean = sum(tick.values()) / len(tick)
            for tenant, tokens in tick.items():
                totals[tenant] = totals.get(tenant, 0.0) + tokens
                means[tenant] = means.get(tenant, 0.0) + mean
        shares = [totals[tenant] / mean for tenant, mean in means.items() if mean]
        if not shares:
            return Shares()
        differences = [totals[tenant] - mean for tenant, mean in means.items()]
        index = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
        return Shares(index, max(differences) - min(differences))

    def _expire(self) -> None:
        while self._ticks and self._ticks[0][0] <= self._clock() - _WINDOW_SECONDS:
            self._ticks.popleft()

    def _on_timer(self) -> None:
        self.tick()
        self._timer = None
        if any(True for _ in self._live()):
            self.start()
