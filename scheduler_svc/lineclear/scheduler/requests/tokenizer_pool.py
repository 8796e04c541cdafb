"""Texts and conversations to token ids and back, without holding up the event loop.

Small inputs are done at once. Large ones wait for their turn at a gate that divides the work by caller: texts are
tokenized in threads, because the library lets go of the interpreter while it works; tokens become text in slices on
the loop, because that is Python, and in a thread it would take the interpreter from the loop for milliseconds at a
time; conversations are rendered by other processes, which can be ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lineclear.scheduler.requests import validation
from lineclear.scheduler.requests.fair_semaphore import FairSemaphore
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES, LoopPacer
from lineclear.scheduler.requests.template_pool import TemplatePool
from lineclear.scheduler.security import identity
from lineclear.scheduler.text.chat_template import ChatTemplate, no_chat_template
from lineclear.scheduler.text.detokenizer import AnswerText, IncrementalDecoder
from lineclear.scheduler.text.template_renderer import ChatMessage
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb

_INLINE_BYTES = 1024  # a smaller text is tokenized sooner than a thread would begin
_INLINE_TOKENS = 512  # become text in some 100 microseconds; also a slice of more
_PAUSE_SECONDS = 0.001  # between two slices: without it the engine's thread would wait for the interpreter all the time
_MESSAGE_BYTES = 64  # what a message costs a template besides its content
_EXPANSION = 8  # a template makes at most so many times max_prompt_bytes of a conversation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """How much text is worked on at a time, and how long on one conversation."""

    threads: int = 2
    max_busy: int = 64
    """Large texts that are worked on or wait for that."""
    max_conversations: int = 1024
    """The same of conversations, which are all rendered one after the other, small ones too."""
    template_processes: int = 2
    template_seconds: float = 2.0
    max_prompt_bytes: int = 512 * 1024


class TokenizerPool:
    """The tokenizer and the chat template as the handlers use them. On one event loop.

    Where `limits.max_busy` large inputs wait, one more is QueueFull, for the caller that has most of them waiting.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None, limits: TextLimits, pacer: LoopPacer) -> None:
        self.tokenizer = tokenizer
        self._pacer = pacer
        self._chat = chat
        self._pool: TemplatePool | None = None
        if chat is not None:
            max_bytes = _EXPANSION * limits.max_prompt_bytes + 65536
            self._pool = TemplatePool(chat, cpu_seconds=limits.template_seconds, max_bytes=max_bytes)
        self._texts = _semaphore(limits.threads, limits.max_busy, "inputs are being tokenized or wait for that")
        self._templates = _semaphore(
            limits.template_processes, limits.max_conversations, "conversations are or wait to be rendered"
        )
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="tokenizer")
        _start_all(self._threads, limits.threads)
        self._num_processes = limits.template_processes
        self._working: set[asyncio.Future[Any]] = set()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are taken."""
        return self._pool is not None

    async def prepare(self) -> None:
        """Have what the first request needs ready."""
        if self._pool is not None:
            await self._pool.prepare(self._num_processes)

    def close(self) -> None:
        """Let go of threads and processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    async def ids(self, request: pb.GenerateRequest, chat_time_us: int = 0) -> Sequence[int]:
        """The tokens of a request's prompt; `chat_time_us` is what the chat template takes for the time."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return request.token_ids.ids
        return await (self.encode_chat(request.chat, chat_time_us) if kind == "chat" else self.encode(request.text))

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text; special tokens written in it are plain text."""
        return await self._encode(self.tokenizer.encode, text)

    async def encode_chat(self, chat: pb.ChatMessages, time_us: int = 0) -> list[int]:
        """The tokens of a conversation, rendered as at that time (`wall_clock_us`; 0: now).

        Raises NoChatTemplate, or InvalidRequest for what the template does not take or takes too long for.
        """
        template, pool = self._chat, self._pool
        if template is None or pool is None:
            raise no_chat_template()
        if chat.ByteSize() > SMALL_BYTES:
            await self._pacer.wait()
        with self._pacer.measured():
            validation.check_roles(chat, template.knows_role)
            turns = [ChatMessage(message.role, message.content) for message in chat.messages]
        opens_answer = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        cost = sum(len(turn.content) + _MESSAGE_BYTES for turn in turns)
        text = await self._in_turn(
            self._templates,
            cost,
            lambda: asyncio.ensure_future(pool.render(turns, add_generation_prompt=opens_answer, time_us=time_us)),
        )
        return await self._encode(self.tokenizer.encode_sealed, text)

    async def decode(self, ids: Sequence[int], *, keep_special: bool, vocab_size: int) -> str:
        """The text of tokens. Raises TokenOutOfVocabulary."""
        decoder = IncrementalDecoder(self.tokenizer, keep_special=keep_special)
        parts: list[str] = []
        done = 0

        def push(some: Sequence[int]) -> None:
            nonlocal done
            validation.check_token_ids(some, done, vocab_size)  # here, because all at once would hold up the loop
            done += len(some)
            parts.append("".join(map(decoder.push, some)))

        await self._in_slices(ids, push)
        return "".join(parts) + decoder.flush()

    async def replay(self, text: AnswerText, received: Sequence[int]) -> None:
        """Bring the text of an answer to where these tokens leave it. What they release was sent by somebody else.

        Stops at a stop string: `text.match` says after how many tokens.
        """

        def push(some: Sequence[int]) -> None:
            for token_id in some:
                if text.match is not None:
                    return
                text.push(token_id)

        await self._in_slices(received, push)

    async def _encode(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        if len(text) <= _INLINE_BYTES:
            return encode(text)
        loop = asyncio.get_running_loop()
        return await self._in_turn(self._texts, len(text), lambda: loop.run_in_executor(self._threads, encode, text))

    async def _in_slices(self, ids: Sequence[int], work: Callable[[Sequence[int]], object]) -> None:
        if len(ids) <= _INLINE_TOKENS:
            work(ids)
            return
        async with self._texts.slot(identity.flow(), len(ids)):
            for start in range(0, len(ids), _INLINE_TOKENS):
                work(ids[start : start + _INLINE_TOKENS])
                await asyncio.sleep(_PAUSE_SECONDS)  # others first

    async def _in_turn(self, gate: FairSemaphore, cost: float, begin: Callable[[], asyncio.Future[T]]) -> T:
        """The result of what `begin` begins when it is this caller's turn."""
        flow = identity.flow()
        await gate.acquire(flow, cost)
        future = begin()
        self._working.add(future)

        def done(future: asyncio.Future[T]) -> None:
            gate.release(flow)
            self._working.discard(future)
            if not future.cancelled():
                future.exception()  # its caller may be gone, then nobody else asks

        future.add_done_callback(done)
        # A caller who hangs up stops neither thread nor process, so the place stays taken until they are done.
        return await asyncio.shield(future)


def _semaphore(places: int, max_busy: int, what: str) -> FairSemaphore:
    places = min(places, max_busy)
    return FairSemaphore(places, max_busy - places, what)


def _start_all(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Start the threads now. Later, while the system lends none, a request would fail for want of one."""
    gate = threading.Event()
    for _ in range(num_threads):  # each finds all others busy
        pool.submit(gate.wait)
    gate.set()
