"""The processes that render chat templates: started when they are needed, ended when they take too long.

Decides nothing about who is next; that is the fair gate's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import structlog

from lineclear.errors import LineclearError, QueueFull
from lineclear.scheduler.text.chat_template import ChatTemplate
from lineclear.scheduler.text.template_process import LENGTH, RENDERED, pack_conversation
from lineclear.scheduler.text.template_renderer import ChatMessage, not_taken

log = structlog.get_logger()

_COMMAND = (sys.executable, "-P", "-m", "lineclear.scheduler.text.template_process")
_PATIENCE = 10  # a conversation may take so many times its CPU time where the machine is busy
_START_SECONDS = 30.0
_EXIT_LOOKS, _LOOK_SECONDS = 100, 0.01  # at a process whose connection closed: its exit code comes right after that
_NICENESS = 10  # a flood of conversations takes little of a busy machine from the worker and the event loop


class TemplatePool:
    """Renders conversations in other processes, as many as there are at a time. On one event loop."""

    def __init__(self, template: ChatTemplate, *, cpu_seconds: float, max_bytes: int) -> None:
        self._definition = template.definition(cpu_seconds=cpu_seconds, max_bytes=max_bytes)
        self._cpu_seconds = cpu_seconds
        self._max_frame = max_bytes + 1024
        self._idle: list[_Renderer] = []
        self._all: set[_Renderer] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Of all processes."""
        return [renderer.popen.pid for renderer in self._all]

    @property
    def num_idle(self) -> int:
        """Processes that render nothing now."""
        return len(self._idle)

    def close(self) -> None:
        """End all of them."""
        self._is_closed = True
        for renderer in list(self._all):
            self._end(renderer)
        self._idle.clear()

    async def prepare(self, count: int) -> None:
        """Start processes, so that the first conversations do not wait for them."""
        with contextlib.suppress(LineclearError):
            for _ in range(count):
                self._idle.append(await self._start())

    async def render(self, turns: Sequence[ChatMessage], *, add_generation_prompt: bool, time_us: int = 0) -> str:
        """Return the conversation as one text whose special tokens are sealed, as at that time (0: now).

        Raises InvalidRequest if the template does not take this conversation, or takes too long for it; QueueFull
        where no process could be started just now, or it was ended by something else.
        """
        conversation = pack_conversation(turns, add_generation_prompt=add_generation_prompt, time_us=time_us)
        renderer = self._take_idle() or await self._start()
        try:
            async with asyncio.timeout(_START_SECONDS + _PATIENCE * self._cpu_seconds):
                answer = await renderer.ask(conversation, self._max_frame)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            raise await self._explanation(renderer) from None
        except BaseException:  # its answer would be taken for that to the next conversation
            self._end(renderer)
            raise
        self._idle.append(renderer)
        text = answer[1:].decode()
        if answer[:1] != RENDERED:
            raise not_taken(text)
        return text

    def _take_idle(self) -> _Renderer | None:
        while self._idle:
            renderer = self._idle.pop()
            if renderer.popen.poll() is None:
                return renderer
            self._end(renderer)  # ended by something else
        return None

    async def _start(self) -> _Renderer:
        assert not self._is_closed, "a conversation after the end"
        try:
            renderer = _Renderer(await _connection_and_process())
        except OSError as error:
            log.warning("template_process_not_started", problem=error.strerror)
            raise QueueFull(
                "no process could be started for the chat template; retry later", retry_after_seconds=1.0
            ) from None
        self._all.add(renderer)
        renderer.send(self._definition)
        return renderer

    async def _explanation(self, renderer: _Renderer) -> LineclearError:
        """Return what the caller is told of a conversation whose process ended or is silent. Ends it."""
        exit_code = await renderer.exit_code()
        self._end(renderer)
        log.warning("template_process_ended", pid=renderer.popen.pid, exit_code=exit_code)
        if exit_code == -signal.SIGPROF:
            return not_taken(
                f"the model's chat template takes more than {self._cpu_seconds:g} s of CPU time for this conversation; "
                "send fewer or shorter messages, or raise --max-chat-template-seconds"
            )
        return QueueFull("the process of the chat template ended; retry", retry_after_seconds=1.0)

    def _end(self, renderer: _Renderer) -> None:
        self._all.discard(renderer)
        renderer.end()


_Connection = tuple["subprocess.Popen[bytes]", asyncio.StreamReader, asyncio.StreamWriter]


class _Renderer:
    """One process, and the connection to it."""

    def __init__(self, connection: _Connection) -> None:
        self.popen, self._reader, self._writer = connection

    def send(self, content: bytes) -> None:
        self._writer.write(LENGTH.pack(len(content)) + content)

    async def ask(self, content: bytes, max_bytes: int) -> bytes:
        """Return the answer to a frame. Raises OSError or IncompleteReadError where there is none."""
        self.send(content)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if not 0 < length <= max_bytes:
            raise OSError("a frame of a wrong length")
        return await self._reader.readexactly(length)

    async def exit_code(self) -> int | None:
        """Return what the process ended with; None where it goes on."""
        for _ in range(_EXIT_LOOKS):
            if self.popen.poll() is not None:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        return self.popen.returncode

    def end(self) -> None:
        """Kill it. What is left of it is collected by the next Popen of this process."""
        self._writer.close()
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.poll()


async def _connection_and_process() -> _Connection:
    """Start a process that talks over its standard input and output.

    Popen and not asyncio's, which forks: gRPC's threads do not survive what its handlers do around a fork. Popen uses
    vfork, which runs no handlers.
    """
    ours, theirs = socket.socketpair()
    try:
        popen = subprocess.Popen(  # noqa: ASYNC220  # a millisecond
            _COMMAND, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    with contextlib.suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, popen.pid, _NICENESS)
    reader, writer = await asyncio.open_connection(sock=ours)
    return popen, reader, writer
