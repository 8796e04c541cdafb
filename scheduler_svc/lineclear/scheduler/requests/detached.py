"""Submitted requests and their answers: made without a listener, kept for a while, read from any index.

Decides how many answers are kept and which is forgotten first. Room is divided by tenant: where it runs out, the tenant
that holds most makes room, with the answer that ended longest ago, so a tenant never loses an answer to one that holds
more. Knows nothing of gRPC; how a request is let in is `admission`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from lineclear.errors import DuplicateRequest, LineclearError, QueueFull, UnknownRequest
from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.admission import Admission, RequestContext, outcome_of
from lineclear.scheduler.requests.detached_answer import DetachedAnswer, reserved_bytes
from lineclear.scheduler.security.identity import Identity


@dataclass(frozen=True, slots=True)
class DetachedLimits:
    """Most submitted requests, output tokens and bytes of memory, of all tenants together."""

    answers: int
    tokens: int
    num_bytes: int
    answers_per_tenant: int = 0
    """0 is no limit for a single tenant."""
    ttl_seconds: float = 600.0


@dataclass(slots=True)
class _Share:
    """What one tenant holds, or has reserved. `over` are its answers that ended, in the order in which they did."""

    answers: int = 0
    tokens: int = 0
    num_bytes: int = 0
    over: dict[DetachedAnswer, None] = field(default_factory=dict)

    def take(self, answers: int, tokens: int, num_bytes: int) -> None:
        self.answers += answers
        self.tokens += tokens
        self.num_bytes += num_bytes

    def part_of(self, limits: DetachedLimits, tokens: int = 0, num_bytes: int = 0) -> float:
        """Return the largest part of any limit that the tenant holds, with one more answer where it has tokens."""
        return max(
            (self.answers + (tokens > 0)) / max(1, limits.answers),
            (self.tokens + tokens) / limits.tokens,
            (self.num_bytes + num_bytes) / limits.num_bytes,
        )


class DetachedRequests:
    """All submitted answers, by caller and request_id. On one event loop."""

    def __init__(
        self, admission: Admission, incident: Callable[[BaseException], LineclearError], limits: DetachedLimits
    ) -> None:
        self._admission = admission
        self._incident = incident
        self._limits = limits
        self._by_key: dict[tuple[Identity, str], DetachedAnswer] = {}
        self._shares: dict[tuple[Identity, str], _Share] = {}
        self._held: dict[DetachedAnswer, tuple[int, int]] = {}  # tokens and bytes, held or reserved
        self._total = _Share()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[DetachedAnswer]:
        return iter(self._by_key.values())

    @property
    def num_tokens(self) -> int:
        """Kept, or reserved by those in progress."""
        return self._total.tokens

    @property
    def num_bytes(self) -> int:
        """Kept, or reserved by those in progress."""
        return self._total.num_bytes

    def refuse_duplicate(self, caller: Identity, request_id: str) -> None:
        """Raises DuplicateRequest where an answer of this name is kept."""
        if (caller, request_id) in self._by_key:
            raise DuplicateRequest("the answer to a request with this request_id is kept here; Cancel forgets it")

    def add(self, ticket: RequestContext, max_tokens: int) -> DetachedAnswer:
        """Keep what comes of a request from now on. Raises QueueFull where there is no room for `max_tokens` more."""
        num_bytes = reserved_bytes(ticket.checked, max_tokens)
        self._evict_for(ticket, max_tokens, num_bytes)
        answer = DetachedAnswer(ticket)
        self._by_key[answer.caller, answer.label] = answer
        self._count(answer, 1, max_tokens, num_bytes)
        ticket.output.subscribe(partial(self._on_output, answer, ticket))
        return answer

    def find(self, caller: Identity, request_id: str) -> DetachedAnswer:
        """Return the answer to a request of `caller`. Raises UnknownRequest, also for what is another caller's."""
        answer = self._by_key.get((caller, request_id))
        if answer is None:
            raise UnknownRequest("no submitted request has this request_id, or its answer is kept no longer")
        return answer

    def remove(self, answer: DetachedAnswer) -> None:
        """Keep nothing of an answer that is over."""
        share = self._shares.get((answer.caller, answer.tenant))
        if share is not None and answer in share.over:
            del share.over[answer], self._by_key[answer.caller, answer.label]
            self._count(answer, -1, 0, 0)
            if answer.timer is not None:
                answer.timer.cancel()  # or it would keep the answer alive until it is due

    # --- what comes --------------------------------------------------------------------------------------------------

    def _on_output(self, answer: DetachedAnswer, ticket: RequestContext) -> None:
        mailbox = ticket.output
        while not answer.is_over and mailbox.has_output:
            try:
                delivery = mailbox.read_nowait()
                spent = None if delivery.end is None else self._admission.spent(ticket, delivery.end)
                answer.add(responses.response(delivery, ticket, spent), delivery.pieces)
            except LineclearError as error:
                self._end(answer, ticket, outcome_of(error))
                answer.fail(error)
            except Exception as error:
                self._end(answer, ticket, "internal_error")
                answer.fail(self._incident(error))
            else:
                if delivery.end is not None:
                    self._end(answer, ticket, delivery.end.reason.name.lower())
                elif answer.num_bytes > self._held[answer][1]:  # tokens with more text than was expected
                    self._count(answer, 0, self._held[answer][0], answer.num_bytes)

    def _end(self, answer: DetachedAnswer, ticket: RequestContext, outcome: str) -> None:
        self._count(answer, 0, answer.num_tokens, answer.num_bytes)
        self._shares[answer.caller, answer.tenant].over[answer] = None
        answer.timer = asyncio.get_running_loop().call_later(self._limits.ttl_seconds, self.remove, answer)
        self._admission.close(ticket, outcome)

    # --- room --------------------------------------------------------------------------------------------------------

    def _count(self, answer: DetachedAnswer, more_answers: int, tokens: int, num_bytes: int) -> None:
        """Count `tokens` and `num_bytes` for an answer from now on, in place of what was counted before."""
        key = answer.caller, answer.tenant
        tokens_before, bytes_before = self._held.pop(answer, (0, 0))
        share = self._shares.setdefault(key, _Share())
        for counted in (share, self._total):
            counted.take(more_answers, tokens - tokens_before, num_bytes - bytes_before)
        if more_answers >= 0:
            self._held[answer] = (tokens, num_bytes)
        if share.answers == 0:
            assert (share.tokens, share.num_bytes) == (0, 0), "held by no answer"
            del self._shares[key]

    def _evict_for(self, ticket: RequestContext, tokens: int, num_bytes: int) -> None:
        """Forget answers until there is room. Raises QueueFull where none can be forgotten."""
        mine = self._shares.get((ticket.caller, ticket.tenant)) or _Share()
        while (lack := self._shortage(mine, tokens, num_bytes)) is not None:
            is_own, error = lack
            victim = mine if is_own else self._largest(mine, mine.part_of(self._limits, tokens, num_bytes))
            if not victim.over:
                raise error
            self.remove(next(iter(victim.over)))

    def _largest(self, mine: _Share, part: float) -> _Share:
        """Return the share with ended answers that holds most; `mine` where no other holds more than `part`."""
        others = (share for share in self._shares.values() if share.over and share is not mine)
        largest = max(others, key=lambda share: share.part_of(self._limits), default=mine)
        return largest if largest is not mine and largest.part_of(self._limits) > part else mine

    def _shortage(self, mine: _Share, tokens: int, num_bytes: int) -> tuple[bool, QueueFull] | None:
        """Return whether it is the tenant's own limit that leaves no room, and the error for that; None for room."""
        limits, total = self._limits, self._total
        if limits.answers_per_tenant and mine.answers >= limits.answers_per_tenant:
            what = (
                f"{mine.answers} submitted requests of this tenant are kept, the limit is {limits.answers_per_tenant}"
            )
            figures = {"kept_of_tenant": mine.answers, "limit_of_tenant": limits.answers_per_tenant}
            return True, self._full(what, figures)
        if (
            total.answers < limits.answers
            and total.tokens + tokens <= limits.tokens
            and total.num_bytes + num_bytes <= limits.num_bytes
        ):
            return None
        what = (
            f"{total.answers} submitted requests may make {total.tokens} tokens of {total.num_bytes} bytes, and there "
            f"is room for {limits.answers}, {limits.tokens} and {limits.num_bytes}"
        )
        figures = {"limit": limits.answers, "limit_tokens": limits.tokens, "limit_bytes": limits.num_bytes}
        return False, self._full(what, figures)

    def _full(self, what: str, figures: dict[str, int]) -> QueueFull:
        return QueueFull(
            f"{what}; retry later, or forget answers with Cancel",
            retry_after_seconds=self._admission.retry_after_seconds(),
            metadata={name: str(figure) for name, figure in figures.items()},
        )
