"""How equally tenants are served that wait at the same time: Jain's index over their tokens by weight.

Only seconds in which at least two tenants have requests waiting count, and only those tenants: a tenant that asks for
little is not treated unfairly. The index is (sum x)^2 / (n * sum x^2) (Jain, Chiu, Hawe 1984).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lineclear.scheduler.requests.request_context import RequestContext

_TICK_SECONDS = 1.0
_WINDOW_TICKS = 60


@dataclass(frozen=True, slots=True)
class Shares:
    """`index` is 1 where all tenants get the same. `gap_tokens` is the largest difference of two tenants."""

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
    ) -> None:
        self._waiting, self._live, self._weights = waiting, live, weights
        self._ticks: deque[dict[str, float]] = deque(maxlen=_WINDOW_TICKS)
        self._served: Counter[str] = Counter()  # since the last tick, of requests that ended
        self._had_waiting: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Run the timer: a request is live."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._on_timer)

    def ended(self, request: RequestContext) -> None:
        """Count the tokens of a request since the last tick."""
        self._served[request.tenant] += request.take_served_tokens()

    def tick(self) -> None:
        """End a second."""
        for request in self._live():
            self._served[request.tenant] += request.take_served_tokens()
        waiting = frozenset(self._waiting())
        both = self._had_waiting & waiting
        self._had_waiting = waiting
        served, self._served = self._served, Counter()
        self._ticks.append({t: served[t] / self._weights.get(t, 1.0) for t in both} if len(both) > 1 else {})

    def shares(self) -> Shares:
        """Return the figures of the last minute."""
        totals: Counter[str] = Counter()
        for tick in self._ticks:
            for tenant, tokens in tick.items():
                totals[tenant] += tokens  # type: ignore[assignment]  # tokens by weight are no whole numbers
        values = list(totals.values())
        squares = sum(tokens**2 for tokens in values)
        if len(values) < 2 or not squares:
            return Shares()
        return Shares(sum(values) ** 2 / (len(values) * squares), max(values) - min(values))

    def _on_timer(self) -> None:
        self.tick()
        self._timer = None
        if any(True for _ in self._live()):
            self.start()
