"""The order `fair`: tenants that wait get the same number of tokens, whoever asks more often or for more.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over tokens. A request's rank is where its tenant's account stands
when it arrives, and the account is charged with all it can take, prompt and `max_tokens`. The lowest rank is next, and
the clock is the highest that has begun: an account that fell behind it starts from it, so nobody saves up a claim by
staying away. What a request was charged and did not use is taken off the account when it ends and counts for requests
to come; ranks that were given stay.

Counting tokens by tenant is the idea of VTC (Sheng et al., OSDI 2024). Its counters follow every token and so decide
anew in each step; a rank that stays lets one queue serve all orders, and costs nothing while nobody arrives or ends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lineclear.scheduler.core.sequence import Request, Sequence

_MOST_DEBTORS = 4096


@dataclass(slots=True)
class _Account:
    """Of one tenant, in tokens."""

    charged: int = 0
    last_rank: int = 0
    num_waiting: int = 0
    num_live: int = 0


class FairShare:
    """By the tenant's tokens."""

    prefill_first = False

    def __init__(self, settings: object) -> None:
        self._clock = 0
        self._present: dict[str, _Account] = {}  # tenants with a live request
        self._debtors: dict[str, _Account] = {}  # others, charged beyond the clock; the longest gone first

    def key(self, request: Request, now: float) -> float:
        """See Order."""
        account = self._present.get(request.tenant)
        if account is None:
            account = self._debtors.pop(request.tenant, _Account())
            self._present[request.tenant] = account
        account.charged = max(account.charged, self._clock)
        rank = account.charged
        if account.num_waiting:
            rank = max(rank, account.last_rank)  # after what was given back, still behind one's own
        account.charged += _most_tokens(request)
        account.last_rank = rank
        account.num_waiting += 1
        account.num_live += 1
        return rank

    def on_start(self, sequence: Sequence) -> None:
        """See Order."""
        self._clock = max(self._clock, int(sequence.queue_key[0]))
        self._present[sequence.request.tenant].num_waiting -= 1

    def on_finish(self, sequence: Sequence) -> None:
        """See Order."""
        tenant = sequence.request.tenant
        account = self._present[tenant]
        account.num_waiting -= sequence.started_at is None
        used = 0 if sequence.started_at is None else len(sequence.tokens)
        account.charged -= _most_tokens(sequence.request) - used
        account.num_live -= 1
        if account.num_live == 0:
            del self._present[tenant]
            if account.charged > self._clock:
                self._debtors[tenant] = account
            if len(self._debtors) > _MOST_DEBTORS:
                del self._debtors[next(iter(self._debtors))]
        if not self._present:
            self._debtors.clear()  # nobody waited meanwhile: nothing is owed to anybody

    def dump(self) -> dict[str, Any]:
        """See Order."""
        return {
            "clock": self._clock,
            "present": {tenant: asdict(account) for tenant, account in self._present.items()},
            "debtors": {tenant: asdict(account) for tenant, account in self._debtors.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """See Order."""
        self._clock = state["clock"]
        self._present = {tenant: _Account(**account) for tenant, account in state["present"].items()}
        self._debtors = {tenant: _Account(**account) for tenant, account in state["debtors"].items()}


def _most_tokens(request: Request) -> int:
    return len(request.prompt) + request.max_tokens
