"""Answers nobody has to listen to: made by themselves, kept for a while, read from any index as often as one likes.

Decides how many there may be and which is forgotten first: the one that ended longest ago. Knows nothing of gRPC; how a
request is let in is `admission`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from lineclear.errors import DuplicateRequest, InvalidRequest, LineclearError, QueueFull, UnknownRequest
from lineclear.scheduler.access.identity import Identity
from lineclear.scheduler.rpc import responses
from lineclear.scheduler.rpc.admission import Admission, Ticket, outcome_of
from lineclear.v1 import inference_pb2 as pb

_TOKENS_OF_A_MESSAGE = 1024


class Detached:
    """One answer: what came so far, and how it ended. `reserved` tokens of room are its own."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.reserved = 0
        self.timer: asyncio.TimerHandle | None = None
        self.first_index = len(ticket.checked.received)
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.error: LineclearError | None = None
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._tail = ""  # text that came with the end and belongs to no token
        self._logprobs: list[pb.TokenLogprobs] = []
        self._times_us: list[int] = []
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.finished is not None or self.error is not None

    @property
    def next_index(self) -> int:
        """Of the token to come."""
        return self.first_index + len(self._token_ids)

    @property
    def state(self) -> pb.ResultState.ValueType:
        """How far it is."""
        if self.error is not None:
            return pb.RESULT_STATE_FAILED
        if self.finished is not None:
            return pb.RESULT_STATE_FINISHED
        return pb.RESULT_STATE_WAITING if self.started is None else pb.RESULT_STATE_RUNNING

    def add(self, message: pb.GenerateResponse, pieces: list[str]) -> None:
        """What came; `pieces` is the text of each token and of the end."""
        count = len(message.token_ids)
        self._token_ids += message.token_ids
        self._pieces += pieces[:count] if self.ticket.checked.wants_text else [""] * count
        self._logprobs += message.logprobs
        self._times_us += message.token_times_us
        if message.HasField("started"):
            self.started = message.started
        if message.HasField("finished"):
            self.finished = message.finished
            self._tail = "".join(pieces[count:]) if self.ticket.checked.wants_text else ""
        self._tell()

    def fail(self, error: LineclearError) -> None:
        """It ended without an answer."""
        self.error = error
        self._tell()

    def whole(self) -> pb.GenerateResponse:
        """Everything in one piece, without what is as large as it wants to be."""
        return self.message(self.first_index, self.next_index, brief=True)

    def _check(self, from_index: int) -> None:
        """Raises InvalidRequest where nobody can listen from there on."""
        if not self.first_index <= from_index <= self.next_index:
            raise InvalidRequest.at("from_index", f"must be in [{self.first_index}, {self.next_index}] now")

    def read(self, from_index: int) -> Listener:
        """Everything from there on, as it comes. Raises InvalidRequest where nobody can listen from there."""
        self._check(from_index)
        return Listener(self, from_index)

    async def change(self) -> None:
        """Return when something is new."""
        await self._changed.wait()

    def message(self, start: int, end: int, *, brief: bool = False) -> pb.GenerateResponse:
        """Tokens [start, end) and what belongs to them; with the end, where that follows."""
        a, b = start - self.first_index, end - self.first_index
        is_last = self.finished is not None and end == self.next_index
        text = "".join(self._pieces[a:b]) + (self._tail if is_last else "")
        message = pb.GenerateResponse(first_index=start, token_ids=self._token_ids[a:b], text=text)
        if not brief:
            message.logprobs.extend(self._logprobs[a:b])
            message.token_times_us.extend(self._times_us[a:b])
        if brief and self.started is not None:
            message.started.CopyFrom(self.started)
        if is_last and self.finished is not None:
            message.finished.CopyFrom(self.finished)
        return message

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Listener:
    """One listener: iterate for messages. Ends after the answer's end, or raises what the request failed with."""

    def __init__(self, answer: Detached, from_index: int) -> None:
        self._answer = answer
        self._index = from_index
        self._is_greeted = False
        self._is_done = False

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        answer = self._answer
        while not self._is_done:
            greeting = answer.started if not self._is_greeted else None
            if greeting is not None or self._index < answer.next_index or answer.finished is not None:
                return self._next(greeting)
            if answer.error is not None:
                raise answer.error
            await answer.change()
        raise StopAsyncIteration

    def _next(self, greeting: pb.Started | None) -> pb.GenerateResponse:
        end = min(self._answer.next_index, self._index + _TOKENS_OF_A_MESSAGE)
        message = self._answer.message(self._index, end)
        self._index = end
        if greeting is not None:
            self._is_greeted = True
            message.started.CopyFrom(greeting)
        self._is_done = message.HasField("finished")
        return message


class DetachedAnswers:
    """All of them, by caller and request_id. On one event loop."""

    def __init__(
        self,
        admission: Admission,
        incident: Callable[[BaseException], LineclearError],
        *,
        max_answers: int,
        max_tokens: int,
        ttl_seconds: float,
    ) -> None:
        self._admission = admission
        self._incident = incident
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._ttl_seconds = ttl_seconds
        self._by_key: dict[tuple[Identity, str], Detached] = {}
        self._over: dict[tuple[Identity, str], Detached] = {}  # in the order in which they ended
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Detached]:
        return iter(self._by_key.values())

    @property
    def num_tokens(self) -> int:
        """Kept, or reserved by those in progress."""
        return self._num_tokens

    def refuse_duplicate(self, caller: Identity, request_id: str) -> None:
        """Raises DuplicateRequest where an answer of this name is kept."""
        if (caller, request_id) in self._by_key:
            raise DuplicateRequest("the answer to a request with this request_id is kept here; Cancel forgets it")

    def keep(self, ticket: Ticket, max_tokens: int) -> Detached:
        """Keep what comes of a request from now on. Raises QueueFull where there is no room for `max_tokens` more."""
        self._make_room(max_tokens)
        answer = Detached(ticket)
        answer.reserved = max_tokens
        self._num_tokens += max_tokens
        self._by_key[ticket.caller, ticket.mailbox.label] = answer
        ticket.mailbox.listen(lambda: self._heard(answer))
        return answer

    def find(self, caller: Identity, request_id: str) -> Detached:
        """Raises UnknownRequest; also for what is another caller's."""
        answer = self._by_key.get((caller, request_id))
        if answer is None:
            raise UnknownRequest("no submitted request has this request_id, or its answer is kept no longer")
        return answer

    def forget(self, answer: Detached) -> None:
        """Of one that is over, nothing is kept any more."""
        key = answer.ticket.caller, answer.ticket.mailbox.label
        if self._over.get(key) is answer:
            del self._over[key], self._by_key[key]
            self._num_tokens -= answer.reserved
            if answer.timer is not None:
                answer.timer.cancel()  # or it would keep the answer alive until it is due

    def _heard(self, answer: Detached) -> None:
        mailbox = answer.ticket.mailbox
        while not answer.is_over and mailbox.has_news:
            try:
                delivery = mailbox.take_now()
                spent = None if delivery.end is None else self._admission.spent(answer.ticket, delivery.end)
                answer.add(responses.response(delivery, answer.ticket, spent), list(delivery.pieces))
            except LineclearError as error:
                self._end(answer, outcome_of(error))
                answer.fail(error)
            except Exception as error:
                self._end(answer, "internal")
                answer.fail(self._incident(error))
            else:
                if delivery.end is not None:
                    self._end(answer, delivery.end.reason.name.lower())

    def _end(self, answer: Detached, outcome: str) -> None:
        kept = answer.next_index - answer.first_index
        self._num_tokens += kept - answer.reserved
        answer.reserved = kept
        self._over[answer.ticket.caller, answer.ticket.mailbox.label] = answer
        answer.timer = asyncio.get_running_loop().call_later(self._ttl_seconds, self.forget, answer)
        self._admission.close(answer.ticket, outcome)

    def _make_room(self, max_tokens: int) -> None:
        def fits() -> bool:
            return len(self._by_key) < self._max_answers and self._num_tokens + max_tokens <= self._max_tokens

        while not fits() and self._over:
            self.forget(next(iter(self._over.values())))
        if not fits():
            raise QueueFull(
                f"{len(self._by_key)} submitted requests may make {self._num_tokens} tokens, and there is room for "
                f"{self._max_answers} and {self._max_tokens}; retry later",
                retry_after_seconds=self._admission.retry_after_seconds(),
                metadata={"limit": str(self._max_answers), "limit_tokens": str(self._max_tokens)},
            )
