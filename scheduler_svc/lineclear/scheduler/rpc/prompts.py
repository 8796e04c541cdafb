"""Texts and conversations to token ids and back, without holding up the event loop.

Decides what is done at once and what in a thread, and how much of that there may be. What a prompt may be is
`validation`'s, what its tokens are `tokenizer`'s and `chat`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lineclear.errors import QueueFull
from lineclear.scheduler.rpc import validation
from lineclear.scheduler.text.chat import ChatTemplate, Turn, no_chat_template
from lineclear.scheduler.text.detokenizer import AnswerText, decode
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb

_INLINE_BYTES = 1024  # a smaller text is tokenized sooner than a thread would begin

T = TypeVar("T")


class Prompts:
    """The tokenizer as the handlers use it. On one event loop.

    At most `max_busy` large inputs are being tokenized or wait for that; one more is QueueFull.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None, *, threads: int, max_busy: int) -> None:
        self.tokenizer = tokenizer
        self.has_chat_template = chat is not None
        self._chat = chat
        self._max_busy = max_busy
        self._num_busy = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        _start_all(self._threads, threads)

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ids(self, request: pb.GenerateRequest) -> Sequence[int]:
        """The tokens of a request's prompt."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return request.token_ids.ids
        return await (self.encode_chat(request.chat) if kind == "chat" else self.encode(request.text))

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text; special tokens written in it are plain text."""
        return await self._off_loop(lambda: self.tokenizer.encode(text), len(text))

    async def encode_chat(self, chat: pb.ChatMessages) -> list[int]:
        """The tokens of a conversation. Raises NoChatTemplate, or InvalidRequest for a role the template lacks."""
        template = self._chat
        if template is None:
            raise no_chat_template()
        validation.check_roles(chat, template.knows_role)
        turns = [Turn(message.role, message.content) for message in chat.messages]
        opens_answer = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        return await self._off_loop(
            lambda: self.tokenizer.encode_sealed(template.render(turns, add_generation_prompt=opens_answer)),
            sum(len(turn.content) for turn in turns),
        )

    async def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """The text of tokens."""
        return await self._off_loop(lambda: decode(self.tokenizer, ids, keep_special=keep_special), 8 * len(ids))

    async def replay(self, text: AnswerText, received: Sequence[int]) -> None:
        """Bring the text of an answer to where these tokens leave it. What they release was sent by somebody else.

        Stops at a stop string: `text.match` says after how many tokens.
        """

        def work() -> None:
            for token_id in received:
                text.push(token_id)
                if text.match is not None:
                    return

        await self._off_loop(work, len(received))

    async def _off_loop(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, which is about `size` bytes of it; done in a thread where it would hold up others."""
        if size <= _INLINE_BYTES:
            return work()
        if self._num_busy >= self._max_busy:
            raise QueueFull(
                f"{self._num_busy} inputs are being tokenized, which is the limit; retry later",
                retry_after_seconds=1.0,
                metadata={"limit": str(self._max_busy)},
            )
        self._num_busy += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._done)
        # A caller who hangs up does not stop the thread, so the place stays taken until that is done.
        return await asyncio.shield(future)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._num_busy -= 1
        if not future.cancelled():
            future.exception()  # its caller may be gone, then nobody else asks


def _start_all(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Start the threads now. Later, while the system lends none, a request would fail for want of one."""
    gate = threading.Event()
    for _ in range(num_threads):  # each finds all others busy
        pool.submit(gate.wait)
    gate.set()
