"""Tokenize and detokenize prompts without blocking the event loop.

Small inputs are processed at once. Large ones wait for a fair semaphore. Texts are tokenized in threads of low
priority, because the library releases the interpreter lock. Tokens are decoded in slices on the loop: a thread would
hold the lock for milliseconds. Conversations are rendered by child processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lineclear.errors import NoChatTemplate
from lineclear.process.priority import lower_priority
from lineclear.scheduler.requests.fair_semaphore import FairSemaphore
from lineclear.scheduler.requests.limited_processes import NICENESS, LimitedProcesses, ProcessKilled
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES, LoopPacer
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate import tools
from lineclear.scheduler.security import identity
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.detokenizer import AnswerText, IncrementalDecoder
from lineclear.scheduler.text.limited_child import Refused
from lineclear.scheduler.text.sampling_texts import BreakerIndex, Breakers, bad_word_ids
from lineclear.scheduler.text.template_renderer import ChatMessage, ChatTemplate, Conversation, not_taken
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb

_INLINE_BYTES = 1024  # tokenizing a smaller text takes less time than starting in a thread
_INLINE_TOKENS = 512  # decoded in about 100 us; also the size of a slice
_MAX_BUSY = 64  # large inputs in progress or waiting: seconds of work for two threads, megabytes of text
_PAUSE_SECONDS = 0.001  # between slices, so that the engine's thread gets the interpreter lock
_EXPANSION = 8  # largest rendered conversation, as a multiple of max_prompt_bytes
_MESSAGE_BYTES = 64  # cost of a message in addition to its content

T = TypeVar("T")


class TokenizerPool:
    """Runs the tokenizer and the chat template. On one event loop.

    Above `_MAX_BUSY` large inputs, the tenant with most waiting ones gets QueueFull.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatTemplate | None, settings: SchedulerSettings, pacer: LoopPacer
    ) -> None:
        self.tokenizer = tokenizer
        self._breaker_index = BreakerIndex(tokenizer)
        self._pacer = pacer
        self._chat = chat
        self.processes: LimitedProcesses | None = None
        """Render conversations; None without a chat template."""
        self._template_seconds = settings.max_chat_template_seconds
        if chat is not None:
            most = _EXPANSION * settings.max_prompt_bytes + 65536
            self.processes = LimitedProcesses(
                "chat template",
                "lineclear.scheduler.text.template_renderer",
                {**chat.definition, "max_bytes": most},
                cpu_seconds=self._template_seconds,
                max_bytes=most + 1024,
                max_waiting=settings.max_queue_size,
                what="conversations are or wait to be rendered",
            )
        places = min(settings.tokenizer_threads, _MAX_BUSY)
        self.turns = FairSemaphore(places, _MAX_BUSY - places, "inputs are being tokenized or wait for that")
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, "tokenizer", lower_priority, (NICENESS,))
        _start_all(self._threads, settings.tokenizer_threads)

    @property
    def has_chat_template(self) -> bool:
        return self.processes is not None

    async def prepare(self) -> None:
        """Start the processes for the first conversation."""
        if self.processes is not None:
            await self.processes.prepare()

    def close(self) -> None:
        """Stop threads and processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.processes is not None:
            self.processes.close()

    async def ids(self, request: pb.GenerateRequest, chat_time_us: int = 0) -> Sequence[int]:
        """Return the tokens of a prompt; `chat_time_us` is the time for the chat template."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return request.token_ids.ids
        return await (self.encode_chat(request.chat, chat_time_us) if kind == "chat" else self.encode(request.text))

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Special tokens in it count as plain text."""
        return await self._in_thread(lambda: self.tokenizer.encode(text), len(text))

    async def encode_continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that continues another one: without a beginning-of-sequence token."""
        return await self._in_thread(lambda: self.tokenizer.encode_sealed(text), len(text))

    async def encode_chat(self, chat: pb.ChatMessages, time_us: int = 0) -> list[int]:
        """Return the tokens of a conversation; `time_us` is the template's time, 0 for now.

        Raises NoChatTemplate, or InvalidRequest if the template rejects the conversation or takes too long.
        """
        template, pool = self._chat, self.processes
        if template is None or pool is None:
            raise NoChatTemplate("this model has no chat template; send text or token_ids instead of chat")
        await self._turn(chat)
        with self._pacer.measured():
            validation.check_roles(chat, template.knows_role)
            tools.check_template_support(chat, takes_tools=template.takes_tools)
            messages = [ChatMessage(message.role, message.content) for message in chat.messages]
        await self._turn(chat)
        with self._pacer.measured():
            context = tools.context(chat)
        await self._turn(chat)
        with self._pacer.measured():
            opens_answer = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
            frame = Conversation(messages, opens_answer, time_us, context).packed()
        cost = chat.ByteSize() + _MESSAGE_BYTES * (len(chat.messages) + len(chat.tools))
        try:
            text = await pool.ask(frame, cost)
        except Refused as refusal:
            raise not_taken(str(refusal)) from None
        except ProcessKilled:
            raise not_taken(
                f"the model's chat template takes more than {self._template_seconds:g} s of CPU time for this "
                "conversation; send fewer or shorter messages, or raise --max-chat-template-seconds"
            ) from None
        return await self.encode_continuation(text)

    async def _turn(self, chat: pb.ChatMessages) -> None:
        """Wait until the next piece of the work on a conversation may be done, if it is large."""
        if chat.ByteSize() > SMALL_BYTES:
            await self._pacer.wait()

    async def decode(self, ids: Sequence[int], *, keep_special: bool, vocab_size: int) -> str:
        """Return the text of tokens. Raises TokenOutOfVocabulary."""
        decoder = IncrementalDecoder(self.tokenizer, keep_special=keep_special)
        parts: list[str] = []
        done = 0

        def push(part: Sequence[int]) -> None:
            nonlocal done
            validation.check_token_ids(part, done, vocab_size)  # by slice, to keep the loop responsive
            done += len(part)
            parts.append("".join(map(decoder.push, part)))

        await self._in_slices(ids, push)
        return "".join(parts) + decoder.flush()

    async def replay(self, text: AnswerText, received: Sequence[int]) -> None:
        """Push the tokens of a resumed answer into `text`, up to a stop string. Another server sent their text."""

        def push(part: Sequence[int]) -> None:
            for token_id in part:
                if text.match is not None:
                    return
                text.push(token_id)

        await self._in_slices(received, push)

    async def bad_words(self, words: Sequence[str]) -> list[list[tuple[int, ...]]]:
        return await self._in_thread(
            lambda: [bad_word_ids(self.tokenizer, word) for word in words], 2 * sum(map(len, words))
        )

    async def breakers(self, texts: Sequence[str]) -> Breakers:
        """Return the tokens of DRY's sequence breakers."""
        return await self._in_thread(lambda: self._breaker_index.find(texts), _INLINE_BYTES + 1)

    async def _in_thread(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work` on a text of `size` characters; for a small one without a thread."""
        if size <= _INLINE_BYTES:
            return work()
        loop = asyncio.get_running_loop()
        return await self.turns.run(identity.flow(), size, lambda: loop.run_in_executor(self._threads, work))

    async def _in_slices(self, ids: Sequence[int], work: Callable[[Sequence[int]], object]) -> None:
        if len(ids) <= _INLINE_TOKENS:
            work(ids)
            return
        async with self.turns.slot(identity.flow(), len(ids)):
            for start in range(0, len(ids), _INLINE_TOKENS):
                work(ids[start : start + _INLINE_TOKENS])
                await asyncio.sleep(_PAUSE_SECONDS)


def _start_all(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Start the threads now. A later start could fail and reject a request."""
    release = threading.Event()
    for _ in range(num_threads):  # each waits, so the pool starts another thread
        pool.submit(release.wait)
    release.set()
