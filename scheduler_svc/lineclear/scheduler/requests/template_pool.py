"""Processes that render chat templates: started on demand, killed when a template takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import structlog

from lineclear.errors import LineclearError, QueueFull
from lineclear.scheduler.text.chat_template import ChatTemplate
from lineclear.scheduler.text.template_process import LENGTH, RENDERED, Conversation, pack_conversation
from lineclear.scheduler.text.template_renderer import not_taken

log = structlog.get_logger()

_COMMAND = (sys.executable, "-P", "-m", "lineclear.scheduler.text.template_process")
_MAX_SLOWDOWN = 10  # ratio of wall time to CPU time on a busy machine
_START_SECONDS = 30.0
_EXIT_POLLS, _POLL_SECONDS = 100, 0.01  # for the exit code of a process that closed its connection
_NICENESS = 10  # a flood of conversations leaves the CPU to the worker and the event loop


class TemplatePool:
    """Renders conversations in child processes, one at a time in each. On one event loop."""

    def __init__(self, template: ChatTemplate, *, cpu_seconds: float, max_bytes: int) -> None:
        self._definition = template.definition(cpu_seconds=cpu_seconds, max_bytes=max_bytes)
        self._cpu_seconds = cpu_seconds
        self._max_frame = max_bytes + 1024
        self._idle: list[_Renderer] = []
        self._all: set[_Renderer] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of all renderers."""
        return [renderer.popen.pid for renderer in self._all]

    @property
    def num_idle(self) -> int:
        """Number of idle processes."""
        return len(self._idle)

    def close(self) -> None:
        """Kill all processes."""
        self._is_closed = True
        for renderer in list(self._all):
            self._end(renderer)
        self._idle.clear()

    async def prepare(self, count: int) -> None:
        """Start `count` processes before the first conversation."""
        with contextlib.suppress(LineclearError):
            for _ in range(count):
                self._idle.append(await self._start())

    async def render(self, conversation: Conversation) -> str:
        """Return the conversation as text with sealed special tokens.

        Raises InvalidRequest if the template rejects the conversation or takes too long. Raises QueueFull if no
        process can be started, or if the process was killed from outside.
        """
        frame = pack_conversation(conversation)
        renderer = self._take_idle() or await self._start()
        try:
            async with asyncio.timeout(_START_SECONDS + _MAX_SLOWDOWN * self._cpu_seconds):
                answer = await renderer.ask(frame, self._max_frame)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            raise await self._explanation(renderer) from None
        except BaseException:  # its late answer would be taken for the next one
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
            self._end(renderer)  # killed from outside
        return None

    async def _start(self) -> _Renderer:
        assert not self._is_closed, "a conversation after close"
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
        """Kill a process that ended or does not answer. Return the error for its conversation."""
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
    """One process and its connection."""

    def __init__(self, connection: _Connection) -> None:
        self.popen, self._reader, self._writer = connection

    def send(self, content: bytes) -> None:
        self._writer.write(LENGTH.pack(len(content)) + content)

    async def ask(self, content: bytes, max_bytes: int) -> bytes:
        """Send a frame and return the answer. Raises OSError or IncompleteReadError."""
        self.send(content)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if not 0 < length <= max_bytes:
            raise OSError("a frame of a wrong length")
        return await self._reader.readexactly(length)

    async def exit_code(self) -> int | None:
        """Return the exit code; None if the process still runs."""
        for _ in range(_EXIT_POLLS):
            if self.popen.poll() is not None:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return self.popen.returncode

    def end(self) -> None:
        """Kill the process. The next Popen of this process reaps it."""
        self._writer.close()
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.poll()


async def _connection_and_process() -> _Connection:
    """Start a process that is connected through its standard input and output.

    Popen uses vfork, which runs no fork handlers. asyncio's subprocess forks, and gRPC's fork handlers break its
    threads.
    """
    parent_end, child_end = socket.socketpair()
    try:
        popen = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond
            _COMMAND,
            stdin=child_end.fileno(),
            stdout=child_end.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        parent_end.close()
        raise
    finally:
        child_end.close()
    with contextlib.suppress(OSError):  # the process may have ended
        os.setpriority(os.PRIO_PROCESS, popen.pid, _NICENESS)
    reader, writer = await asyncio.open_connection(sock=parent_end)
    return popen, reader, writer
