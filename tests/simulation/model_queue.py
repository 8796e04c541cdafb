"""Model of the queue: queue keys, who may overtake, and how long a request waits at most.

The bounds are those of docs/architecture.md. The order `fair` has two more. While two tenants have requests waiting,
the tokens they start with differ by at most the largest request of each. And a request waits for no more tokens of
another tenant's later requests than its own tenant had charged before it, plus one of their requests. The difference
between charge and use of a tenant's ended requests counts for it in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request


@dataclass(slots=True)
class _Waiting:
    """A request that has not started, under the order `fair`."""

    ahead: float
    """Tokens that its tenant had charged before it."""
    settled: Counter[str]
    """Tokens settled by tenant, when the tenant last came back from idle."""
    later: Counter[str] = field(default_factory=Counter)
    """Tokens of later requests that started before it, by tenant."""


@dataclass(slots=True)
class _Lead:
    """How many more tokens the first of two tenants started with."""

    settled: Counter[str]
    tokens: int = 0


class ModelQueue:
    """Tracks arrivals, starts and ends."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._num_arrivals = 0
        self._clock = 0.0
        self._charged: Counter[str] = Counter()  # by tenant, in tokens by weight
        self._largest: Counter[str] = Counter()
        self._last_key: dict[str, float] = {}  # of the tenant's newest request, while it has one waiting
        self._settled: Counter[str] = Counter()
        self._settled_before: Counter[str] = Counter()  # when the tenant last came back from idle
        self._waiting: dict[ModelSequence, _Waiting] = {}
        self._leads: dict[tuple[str, str], _Lead] = {}  # while both tenants have a request waiting

    def key(self, request: Request, now: float, run_seconds: float) -> tuple[float, int]:
        """Return the queue key of a request that arrives and is expected to run that long."""
        self._num_arrivals += 1
        return self._key(request, now, run_seconds), self._num_arrivals

    def preview(self, request: Request, now: float, run_seconds: float) -> tuple[float, int]:
        if self._limits.scheduling_policy != "fair":
            return self._key(request, now, run_seconds), self._num_arrivals + 1
        start = max(self._charged[request.tenant], self._clock)
        return max(start, self._last_key.get(request.tenant, 0)), self._num_arrivals + 1

    def _key(self, request: Request, now: float, run_seconds: float) -> float:
        aging = self._limits.policy.priority_aging_seconds
        if self._limits.scheduling_policy == "priority":
            return now + request.priority * aging
        if self._limits.scheduling_policy == "shortest":
            return now + _tokens(request) / 256 * aging
        if self._limits.scheduling_policy == "deadline":
            due = now + 256 * aging if request.deadline is None else request.deadline
            return max(now, due - run_seconds)
        if self._limits.scheduling_policy == "fair":
            return self._charge(request)
        return now

    def _charge(self, request: Request) -> float:
        tenant = request.tenant
        if tenant not in self._last_key and self._charged[tenant] <= self._clock:
            self._settled_before[tenant] = self._settled[tenant]
        start = max(self._charged[tenant], self._clock)
        self._charged[tenant] = start + self._size(request)
        self._largest[tenant] = max(self._largest[tenant], self._size(request))
        if request.continues:
            return self._clock  # a step of a search is next, as a request that runs
        self._last_key[tenant] = max(start, self._last_key.get(tenant, 0))
        return self._last_key[tenant]

    def switch(
        self, limits: CoreLimits, live: Collection[ModelSequence], run_seconds: Callable[[Request], float]
    ) -> None:
        """Follow other limits. Under another order, started requests and then waiting ones arrive again, by number."""
        before, self._limits = self._limits, limits
        if _order(limits) == _order(before):
            return
        self._clock = 0.0
        for counts in (self._charged, self._largest, self._settled, self._settled_before):
            counts.clear()
        for state in (self._last_key, self._waiting, self._leads):
            state.clear()
        by_number = sorted(live, key=lambda sequence: sequence.number)
        for sequence in (s for s in by_number if s.started_at is not None):
            key = self._key(sequence.request, sequence.since, run_seconds(sequence.request))
            sequence.queue_key = (key, sequence.number)
            self._last_key.clear()  # it does not wait
            self._clock = max(self._clock, sequence.queue_key[0])
        for sequence in (s for s in by_number if s.started_at is None):
            key = self._key(sequence.request, sequence.since, run_seconds(sequence.request))
            sequence.queue_key = (key, sequence.number)
            self.push(sequence)

    def _size(self, request: Request) -> float:
        """Return the tokens that the request is expected to have, by the tenant's weight."""
        return (_tokens(request) - _charged_before(request)) / self._weight(request.tenant)

    def _weight(self, tenant: str) -> float:
        return self._limits.policy.share_weights.get(tenant, 1.0)

    def push(self, sequence: ModelSequence) -> None:
        self._waiting[sequence] = _Waiting(sequence.queue_key[0] - self._clock, self._settled_before.copy())

    def on_start(self, sequence: ModelSequence, waiting: Collection[ModelSequence], *, isolated: bool) -> None:
        """Check and count the first start of one of the `waiting` requests; `isolated` suspects may overtake."""
        continues = sequence.request.continues and self._limits.scheduling_policy == "fair"
        if not isolated and not continues:
            self._check_waits(sequence, waiting)
            if self._limits.scheduling_policy == "fair":
                self._check_shares(sequence, waiting)
        self._clock = max(self._clock, sequence.queue_key[0])
        del self._waiting[sequence]
        self._forget_tenant(sequence.request.tenant, [other for other in waiting if other is not sequence])

    def on_finish(self, sequence: ModelSequence, waiting: Collection[ModelSequence], *, is_idle: bool) -> None:
        """Settle the charge of a request that ended; `waiting` are the requests that have not started."""
        tenant = sequence.request.tenant
        used = 0 if sequence.started_at is None else len(sequence.tokens) - _charged_before(sequence.request)
        unused = self._size(sequence.request) - used / self._weight(tenant)
        self._charged[tenant] -= unused
        self._settled[tenant] += abs(unused)
        if self._waiting.pop(sequence, None) is not None:
            self._forget_tenant(tenant, waiting)
        if is_idle:
            self._charged.clear()

    def _forget_tenant(self, tenant: str, waiting: Collection[ModelSequence]) -> None:
        if all(other.request.tenant != tenant or other.request.continues for other in waiting):
            self._last_key.pop(tenant, None)
            self._leads = {pair: lead for pair, lead in self._leads.items() if tenant not in pair}

    def _check_waits(self, sequence: ModelSequence, waiting: Collection[ModelSequence]) -> None:
        for other in waiting:
            if other.queue_key > sequence.queue_key and self._limits.scheduling_policy == "fair":
                if other.number < sequence.number:
                    tenant, entry = sequence.request.tenant, self._waiting[other]
                    require(tenant != other.request.tenant, "I14", "requests of a tenant start in order of arrival")
                    entry.later[tenant] += self._size(sequence.request)
                    bound = entry.ahead + self._slack(tenant, entry.settled)
                    require(entry.later[tenant] <= bound, "I14", "later requests of another tenant are bounded")
            elif other.queue_key > sequence.queue_key:
                late = sequence.since - other.since
                require(late <= self._longest_wait(other), "I14", "a much later request does not go first")

    def _longest_wait(self, sequence: ModelSequence) -> float:
        """Return by how many seconds a later request may arrive and still have the better key."""
        aging, request = self._limits.policy.priority_aging_seconds, sequence.request
        if self._limits.scheduling_policy == "priority":
            return 255 * aging
        if self._limits.scheduling_policy == "shortest":
            return _tokens(request) / 256 * aging
        if self._limits.scheduling_policy == "deadline":
            return 256 * aging if request.deadline is None else max(0.0, request.deadline - sequence.since)
        return 0.0

    def _check_shares(self, sequence: ModelSequence, waiting: Collection[ModelSequence]) -> None:
        if min(other.queue_key for other in waiting) < max(sequence.queue_key, (self._clock, 0)):
            self._leads.clear()  # a request that did not fit was overtaken, and its tenant catches up
            return
        tenants = sorted({other.request.tenant for other in waiting if not other.request.continues})
        for pair in [(a, b) for a in tenants for b in tenants if a < b]:
            lead = self._leads.setdefault(pair, _Lead(self._settled_before.copy()))
            if sequence.request.tenant in pair:
                size = self._size(sequence.request)
                lead.tokens += size if sequence.request.tenant == pair[0] else -size
            bound = sum(self._slack(tenant, lead.settled) for tenant in pair)
            require(abs(lead.tokens) <= bound, "I14", "waiting tenants differ by at most one request of each")

    def _slack(self, tenant: str, settled: Counter[str]) -> int:
        return self._largest[tenant] + self._settled[tenant] - settled[tenant]

    def on_overtake(self, sequence: ModelSequence, waiting: Collection[ModelSequence]) -> None:
        """Count that `sequence` starts before the `waiting` requests with a better key."""
        for other in waiting:
            if other.queue_key < sequence.queue_key:
                require(other.in_flight == 0, "I14", "a sequence that waits for its samples is not overtaken")
                other.overtaken_count += 1
                bound = self._limits.max_queue_overtakes
                require(other.overtaken_count <= bound, "I14", "overtaken no more often than the bound")


def _order(limits: CoreLimits) -> tuple[object, ...]:
    """Return the settings that keys follow from."""
    return limits.scheduling_policy, limits.policy.priority_aging_seconds, limits.policy.share_weights


def _tokens(request: Request) -> int:
    """Return the tokens that the request is expected to have."""
    return len(request.prompt) + (request.expected_tokens or request.max_tokens)


def _charged_before(request: Request) -> int:
    """Return the leading tokens that an earlier request of the same call was charged with: none without output."""
    if not request.is_sibling or not request.max_tokens:
        return 0
    return len(request.prompt) + (len(request.output) if request.queued_since is not None else 0)
