"""The order `fair`: waiting tenants get the same number of tokens, however many requests each of them sends.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over tokens. A request's key is its tenant's account when it arrives.
Then the account is charged with the tokens that the request is expected to take: prompt and output. The lowest key is
next. The virtual clock is the highest key that has started. An account behind the clock continues from the clock, so an
idle tenant saves up nothing. The outputs of one request are charged with its prompt once. When the request ends, the
account is settled by the tokens used: later requests of the tenant start earlier by the unused tokens, or later by the
excess. The tokens of a tenant of weight w count 1/w.

Counting tokens by tenant is the idea of VTC (Sheng et al., OSDI 2024). VTC updates its counters with every token and
decides in each step; a key that stays lets one queue serve all orders and costs nothing between arrivals and ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from lineclear.scheduler.core.sequence import Request, Sequence

_MAX_DEBTORS = 4096


@dataclass(slots=True)
class _Account:
    """A tenant's account, in tokens by weight."""

    charged: float = 0.0
    last_key: float = 0.0
    num_waiting: int = 0
    num_live: int = 0


class FairShare:
    """A QueueOrder by the tokens charged to the tenant."""

    prefill_first = False

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._clock = 0.0
        self._present: dict[str, _Account] = {}  # tenants with a live request
        self._debtors: dict[str, _Account] = {}  # others charged beyond the clock, longest absent first

    def preview(self, request: Request, now: float, run_seconds: float) -> float:
        """Return the key that `key` would return, without a charge."""
        account = self._present.get(request.tenant) or self._debtors.get(request.tenant) or _Account()
        key = max(account.charged, self._clock)
        return max(key, account.last_key) if account.num_waiting else key

    def key(self, request: Request, now: float, run_seconds: float) -> float:
        """Return the tenant's account and charge it with the request."""
        account = self._present.get(request.tenant)
        if account is None:
            account = self._debtors.pop(request.tenant, _Account())
            self._present[request.tenant] = account
        account.charged = max(account.charged, self._clock)
        key = account.charged
        if account.num_waiting:
            key = max(key, account.last_key)  # after a credit, still behind the tenant's own earlier requests
        account.charged += (request.expected_len - request.charged_before) / self._weight(request.tenant)
        if request.continues:
            key = self._clock  # next, in the place of the requests that it continues
        else:
            account.last_key = key
        account.num_waiting += 1
        account.num_live += 1
        return key

    def on_start(self, sequence: Sequence) -> None:
        """Advance the clock to the key of a request that starts."""
        self._clock = max(self._clock, sequence.queue_key[0])
        self._present[sequence.request.tenant].num_waiting -= 1

    def on_finish(self, sequence: Sequence) -> None:
        """Replace the charge of the request by the tokens that it used."""
        tenant = sequence.request.tenant
        account = self._present[tenant]
        account.num_waiting -= sequence.started_at is None
        used = 0 if sequence.started_at is None else len(sequence.tokens)
        used = max(used, sequence.request.charged_before)
        account.charged -= (sequence.request.expected_len - used) / self._weight(tenant)
        account.num_live -= 1
        if account.num_live == 0:
            del self._present[tenant]
            if account.charged > self._clock:
                self._debtors[tenant] = account
            if len(self._debtors) > _MAX_DEBTORS:
                del self._debtors[next(iter(self._debtors))]
        if not self._present:
            self._debtors.clear()  # with no tenant waiting, no debt matters

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


def share_of(tenant: str) -> str:
    """Return the hashed tenant id for the core and the flight recorder, which must not know names."""
    return blake2b(tenant.encode("utf-8", "replace"), digest_size=8).hexdigest() if tenant else ""
