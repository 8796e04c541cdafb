"""Submitted requests: their answers are kept for a while and can be read from any index.

Memory is divided by caller and tenant. When it runs out, the tenant that holds most loses its longest ended answer, so
a tenant never loses an answer to one that holds more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from lineclear.errors import DuplicateRequest, QueueFull, UnknownRequest
from lineclear.scheduler.requests.output_stream import OutputStream
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.responses import read_output
from lineclear.scheduler.requests.submitted_answer import SubmittedAnswer, reserved_bytes
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class _Usage:
    """Answers, tokens and bytes of one tenant, reservations included. `ended` is ordered by the time of the end."""

    answers: int = 0
    tokens: int = 0
    num_bytes: int = 0
    ended: dict[SubmittedAnswer, None] = field(default_factory=dict)

    def add(self, answers: int, tokens: int, num_bytes: int) -> None:
        self.answers += answers
        self.tokens += tokens
        self.num_bytes += num_bytes

    def part_of(self, settings: SchedulerSettings, tokens: int = 0, num_bytes: int = 0) -> float:
        """Return the largest used part of any limit, with one more answer of `tokens` and `num_bytes` if given."""
        return max(
            (self.answers + (tokens > 0)) / max(1, settings.max_submitted),
            (self.tokens + tokens) / settings.max_submitted_tokens,
            (self.num_bytes + num_bytes) / settings.max_submitted_bytes,
        )


class SubmittedRequests:
    """Submitted answers by caller and request_id. On one event loop.

    `retry_after_seconds` returns the retry hint for a rejected request.
    """

    def __init__(self, settings: SchedulerSettings, retry_after_seconds: Callable[[], float]) -> None:
        self._settings = settings
        self._retry_after_seconds = retry_after_seconds
        self._answers: dict[tuple[Identity, str], SubmittedAnswer] = {}
        self._usage: dict[tuple[Identity, str], _Usage] = {}
        self._counted: dict[SubmittedAnswer, tuple[int, int]] = {}  # tokens and bytes, used or reserved
        self._total = _Usage()

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[SubmittedAnswer]:
        return iter(self._answers.values())

    @property
    def num_tokens(self) -> int:
        return self._total.tokens

    @property
    def num_bytes(self) -> int:
        return self._total.num_bytes

    def check_unused(self, caller: Identity, request_id: str) -> None:
        """Raises DuplicateRequest if an answer with this request_id is kept."""
        if (caller, request_id) in self._answers:
            raise DuplicateRequest("the answer to a request with this request_id is kept here; Cancel removes it")

    def add(self, request: RequestContext) -> SubmittedAnswer:
        """Keep the outputs of a submitted request from now on. Raises QueueFull if they exceed the limits."""
        num_bytes = reserved_bytes(request.validated, request.shape.max_tokens) * len(request.outputs)
        max_tokens = request.shape.max_tokens * len(request.outputs)
        self._evict_for(request, max_tokens, num_bytes)
        answer = SubmittedAnswer(request)
        self._answers[answer.caller, answer.request_id] = answer
        self._count(answer, 1, max_tokens, num_bytes)
        for output in request.outputs:
            output.subscribe(partial(self._on_output, answer, request, output))
        return answer

    def find(self, caller: Identity, request_id: str) -> SubmittedAnswer:
        """Return the answer to a request of `caller`. Raises UnknownRequest, also for requests of other callers."""
        answer = self._answers.get((caller, request_id))
        if answer is None:
            raise UnknownRequest("no submitted request has this request_id, or its answer has expired")
        return answer

    def remove(self, answer: SubmittedAnswer) -> None:
        """Drop an ended answer and its token reservation. No effect on an answer in progress."""
        usage = self._usage.get((answer.caller, answer.tenant))
        if usage is not None and answer in usage.ended:
            del usage.ended[answer], self._answers[answer.caller, answer.request_id]
            self._count(answer, -1, 0, 0)
            if answer.timer is not None:
                answer.timer.cancel()  # a pending timer would keep the answer in memory

    def _on_output(self, answer: SubmittedAnswer, request: RequestContext, output: OutputStream) -> None:
        for response, texts, error in read_output(request, output):
            answer.add(response, texts, error)
            if answer.has_ended:
                self._count(answer, 0, answer.num_tokens, answer.num_bytes)
                self._usage[answer.caller, answer.tenant].ended[answer] = None
                loop = asyncio.get_running_loop()
                answer.timer = loop.call_later(self._settings.submitted_ttl_seconds, self.remove, answer)
            elif answer.num_bytes > self._counted[answer][1]:  # texts longer than the estimate
                self._count(answer, 0, self._counted[answer][0], answer.num_bytes)

    def _count(self, answer: SubmittedAnswer, more_answers: int, tokens: int, num_bytes: int) -> None:
        key = answer.caller, answer.tenant
        tokens_before, bytes_before = self._counted.pop(answer, (0, 0))
        usage = self._usage.setdefault(key, _Usage())
        for counted in (usage, self._total):
            counted.add(more_answers, tokens - tokens_before, num_bytes - bytes_before)
        if more_answers >= 0:
            self._counted[answer] = (tokens, num_bytes)
        if usage.answers == 0:
            assert (usage.tokens, usage.num_bytes) == (0, 0), "counted for no answer"
            del self._usage[key]

    def _evict_for(self, request: RequestContext, tokens: int, num_bytes: int) -> None:
        """Remove ended answers until one more fits. Raises QueueFull if none can be removed."""
        own = self._usage.get((request.call.caller, request.call.tenant)) or _Usage()
        while (shortage := self._shortage(own, tokens, num_bytes)) is not None:
            is_own, error = shortage
            victim = own if is_own else self._largest(own, own.part_of(self._settings, tokens, num_bytes))
            if not victim.ended:
                raise error
            self.remove(next(iter(victim.ended)))

    def _largest(self, own: _Usage, part: float) -> _Usage:
        """Return the largest usage with ended answers; `own` if no other exceeds `part`."""
        others = (usage for usage in self._usage.values() if usage.ended and usage is not own)
        largest = max(others, key=lambda usage: usage.part_of(self._settings), default=own)
        return largest if largest is not own and largest.part_of(self._settings) > part else own

    def _shortage(self, own: _Usage, tokens: int, num_bytes: int) -> tuple[bool, QueueFull] | None:
        """Return whether the tenant's own limit is exceeded, and the error; None if one more answer fits."""
        limits, total = self._settings, self._total
        if limits.max_submitted_per_tenant and own.answers >= limits.max_submitted_per_tenant:
            message = f"submitted requests of this tenant: {own.answers} of {limits.max_submitted_per_tenant}"
            figures = {"kept_of_tenant": own.answers, "limit_of_tenant": limits.max_submitted_per_tenant}
            return True, self._full(message, figures)
        if (
            total.answers < limits.max_submitted
            and total.tokens + tokens <= limits.max_submitted_tokens
            and total.num_bytes + num_bytes <= limits.max_submitted_bytes
        ):
            return None
        message = (
            f"submitted requests: {total.answers} of {limits.max_submitted}, reserved tokens: {total.tokens} of "
            f"{limits.max_submitted_tokens}, reserved bytes: {total.num_bytes} of {limits.max_submitted_bytes}"
        )
        figures = {"limit": limits.max_submitted, "limit_tokens": limits.max_submitted_tokens}
        figures["limit_bytes"] = limits.max_submitted_bytes
        return False, self._full(message, figures)

    def _full(self, message: str, figures: dict[str, int]) -> QueueFull:
        return QueueFull(
            f"{message}; retry later, or remove answers with Cancel",
            retry_after_seconds=self._retry_after_seconds(),
            metadata={name: str(figure) for name, figure in figures.items()},
        )
