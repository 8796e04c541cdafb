"""Whose turn it is, as the oracle sees it: ranks, who may overtake whom, and how long anybody waits at most.

The bounds are those of docs/architecture.md. With `fair` two more hold: while two tenants have requests waiting,
the tokens they are let in with differ by at most the largest request of each, and nobody waits for more of another
tenant's later requests than his own tenant had asked for before him, and one of them more. What a tenant did not use
and got back counts for it in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from simulation.invariant_error import hold
from simulation.model_request import Track

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request


@dataclass(slots=True)
class _Queued:
    """Who waits to begin."""

    ahead: float
    """What his tenant had asked for before him."""
    before: Counter[str]
    """What tenants had been given back before they last began anew."""
    later: Counter[str] = field(default_factory=Counter)
    """Tokens of later requests that went before him, by tenant."""


@dataclass(slots=True)
class _Lead:
    """By how many tokens the first of two tenants was let in with more."""

    before: Counter[str]
    tokens: int = 0


class Turns:
    """Follows who comes, who is let in and who goes."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._num_arrivals = 0
        self._clock = 0.0
        self._charged: Counter[str] = Counter()  # by tenant, in tokens
        self._largest: Counter[str] = Counter()
        self._last: dict[str, float] = {}  # the rank its newest request got, while it has one waiting
        self._given_back: Counter[str] = Counter()
        self._before: Counter[str] = Counter()  # what of it was given back before the tenant last began anew
        self._queued: dict[Track, _Queued] = {}
        self._leads: dict[tuple[str, str], _Lead] = {}  # while both have somebody waiting

    def arrives(self, request: Request, now: float) -> tuple[float, int]:
        """The rank of a request that is let into the queue."""
        self._num_arrivals += 1
        return self._key(request, now), self._num_arrivals

    def _key(self, request: Request, now: float) -> float:
        ageing = self._limits.policy.priority_aging_seconds
        if self._limits.scheduling_policy == "priority":
            return now + request.priority * ageing
        if self._limits.scheduling_policy == "shortest":
            return now + _size(request) / 256 * ageing
        if self._limits.scheduling_policy == "deadline":
            return now + 256 * ageing if request.deadline is None else request.deadline
        if self._limits.scheduling_policy == "fair":
            return self._charge(request)
        return 0.0

    def _charge(self, request: Request) -> float:
        tenant = request.tenant
        if tenant not in self._last and self._charged[tenant] <= self._clock:
            self._before[tenant] = self._given_back[tenant]
        begin = max(self._charged[tenant], int(self._clock))
        self._charged[tenant] = begin + _size(request)
        self._largest[tenant] = max(self._largest[tenant], _size(request))
        self._last[tenant] = max(begin, self._last.get(tenant, 0))
        return self._last[tenant]

    def waits(self, track: Track) -> None:
        """It is in the queue."""
        self._queued[track] = _Queued(track.rank[0] - self._clock, self._before.copy())

    def began(self, track: Track, waiting: Collection[Track], *, alone: bool) -> None:
        """One of `waiting`, who never ran, is let in; `alone` as a suspect, at anybody's cost."""
        if not alone:
            self._nobody_starves(track, waiting)
            if self._limits.scheduling_policy == "fair":
                self._nobody_gets_more(track, waiting)
        self._clock = max(self._clock, track.rank[0])
        del self._queued[track]
        self._left(track.request.tenant, [other for other in waiting if other is not track])

    def ended(self, track: Track, waiting: Collection[Track], *, nobody_left: bool) -> None:
        """It is over; `waiting` are those who still wait to begin."""
        tenant = track.request.tenant
        used = 0 if track.started_at is None else len(track.tokens)
        self._charged[tenant] -= _size(track.request) - used
        self._given_back[tenant] += _size(track.request) - used
        if self._queued.pop(track, None) is not None:
            self._left(tenant, waiting)
        if nobody_left:
            self._charged.clear()

    def _left(self, tenant: str, waiting: Collection[Track]) -> None:
        if all(other.request.tenant != tenant for other in waiting):
            self._last.pop(tenant, None)
            self._leads = {pair: lead for pair, lead in self._leads.items() if tenant not in pair}

    def _nobody_starves(self, track: Track, waiting: Collection[Track]) -> None:
        for other in waiting:
            if other.rank > track.rank and self._limits.scheduling_policy == "fair":
                if other.rank[1] < track.rank[1]:
                    tenant, queued = track.request.tenant, self._queued[other]
                    hold(tenant != other.request.tenant, "I14", "requests of a tenant begin as they came")
                    queued.later[tenant] += _size(track.request)
                    bound = queued.ahead + self._slack(tenant, queued.before)
                    hold(queued.later[tenant] <= bound, "I14", "nobody waits for more of others' than of his own")
            elif other.rank > track.rank:
                late = track.arrival - other.arrival
                hold(late <= self._longest_wait(other), "I14", "nobody who comes so much later goes first")

    def _longest_wait(self, track: Track) -> float:
        """By how much later somebody may come and have the better rank."""
        ageing, request = self._limits.policy.priority_aging_seconds, track.request
        if self._limits.scheduling_policy == "priority":
            return 255 * ageing
        if self._limits.scheduling_policy == "shortest":
            return track.limit / 256 * ageing
        if self._limits.scheduling_policy == "deadline":
            return 256 * ageing if request.deadline is None else request.deadline - track.arrival
        return 0.0

    def _nobody_gets_more(self, track: Track, waiting: Collection[Track]) -> None:
        if min(other.rank for other in waiting) < max(track.rank, (self._clock, 0)):
            self._leads.clear()  # somebody did not fit and was overtaken: he catches up
            return
        tenants = sorted({other.request.tenant for other in waiting})
        for pair in [(a, b) for a in tenants for b in tenants if a < b]:
            lead = self._leads.setdefault(pair, _Lead(self._before.copy()))
            if track.request.tenant in pair:
                lead.tokens += _size(track.request) if track.request.tenant == pair[0] else -_size(track.request)
            bound = sum(self._slack(tenant, lead.before) for tenant in pair)
            hold(abs(lead.tokens) <= bound, "I14", "tenants that wait get the same, but for one request of each")

    def _slack(self, tenant: str, before: Counter[str]) -> int:
        return self._largest[tenant] + self._given_back[tenant] - before[tenant]

    def overtakes(self, track: Track, peers: Collection[Track], yielded: Collection[Track]) -> None:
        """`track` begins before those of `peers` with a better rank, who do not fit; `yielded` just made room."""
        for other in peers:
            if other.rank < track.rank and other not in yielded:
                hold(other.in_flight == 0, "I14", "nobody overtakes who only waits for his own samples")
                other.bypasses += 1
                hold(
                    other.bypasses <= self._limits.max_queue_overtakes, "I14", "overtaken no more often than the bound"
                )


def _size(request: Request) -> int:
    """All the tokens it can take."""
    return len(request.prompt) + request.max_tokens
