"""Validate structured output in child processes with limits, and keep the results."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
from collections import OrderedDict
from pathlib import Path

from lineclear.errors import InvalidRequest, NoStructuredOutput
from lineclear.scheduler.requests.limited_processes import LimitedProcesses, ProcessKilled, Work
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.call_grammar import ForcedCalls
from lineclear.scheduler.text.grammar_process import FORCED_CALLS, pack_definition, pack_form
from lineclear.scheduler.text.limited_child import ANSWERED
from lineclear.v1 import sampling_pb2

_FIELD = "sampling.structured_output"
_MAX_CACHED = 256  # compiled and refused forms; applications send a few of them again and again


class GrammarPool:
    """Compiles forms to grammars. On one event loop.

    Results are kept by the digest of the form, those that were refused too. Requests with the same form wait for one
    result. A busy tenant delays its own forms only.
    """

    def __init__(self, model: Path | None, settings: SchedulerSettings) -> None:
        """`model` is the directory with a tokenizer that works with grammars; None: forms are rejected."""
        self._settings = settings
        self._pool: LimitedProcesses | None = None
        if model is not None:
            seconds, most = settings.max_grammar_seconds, 8 * settings.max_grammar_bytes + 4096
            module, what = "lineclear.scheduler.text.grammar_process", "forms of structured output are compiled or wait"
            definition = pack_definition(model, cpu_seconds=seconds)
            work = Work("structured output", module, definition, seconds, most, settings.max_queue_size, what)
            self._pool = LimitedProcesses(work)
        self._known: OrderedDict[bytes, asyncio.Task[str | InvalidRequest]] = OrderedDict()

    @property
    def is_available(self) -> bool:
        """Whether requests may have structured output."""
        return self._pool is not None

    @property
    def pids(self) -> list[int]:
        """Process ids of all processes."""
        return self._pool.pids if self._pool is not None else []

    @property
    def num_idle(self) -> int:
        """Number of processes that wait for a form."""
        return self._pool.num_idle if self._pool is not None else 0

    @property
    def num_waiting(self) -> int:
        """Number of forms that wait for a process."""
        return self._pool.turns.num_waiting if self._pool is not None else 0

    def close(self) -> None:
        """Kill all processes."""
        if self._pool is not None:
            self._pool.close()

    async def grammar(self, form: sampling_pb2.StructuredOutput) -> str:
        """Return the grammar of a validated form.

        Raises InvalidRequest with the reason, NoStructuredOutput, or QueueFull if too many forms wait.
        """
        kind = form.WhichOneof("form") or ""
        content = json.dumps(list(form.choice.texts)) if kind == "choice" else str(getattr(form, kind))
        frame = pack_form(kind, content, any_whitespace=form.json_whitespace == sampling_pb2.JSON_WHITESPACE_ANY)
        return await self._grammar(f"{_FIELD}.{kind}", frame)

    async def grammar_of_calls(self, calls: ForcedCalls) -> str:
        """Return the grammar of an answer that must call tools. Raises as `grammar`."""
        return await self._grammar("chat.tools", pack_form(FORCED_CALLS, calls.packed(), any_whitespace=False))

    async def _grammar(self, path: str, frame: bytes) -> str:
        if self._pool is None:
            raise NoStructuredOutput(
                "structured output needs a tokenizer of bytes (byte-level BPE, or with byte fallback), which this "
                "model does not have"
            )
        key = hashlib.sha256(frame).digest()
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = asyncio.ensure_future(self._compile(self._pool, path, frame))
            task.add_done_callback(lambda done: self._forget_failure(key, done))
            while len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        found = await asyncio.shield(task)  # another request may wait for it too
        if isinstance(found, InvalidRequest):
            raise found
        return found

    def _forget_failure(self, key: bytes, task: asyncio.Task[str | InvalidRequest]) -> None:
        """Let a form that got no turn or no process be tried again."""
        if (task.cancelled() or task.exception() is not None) and self._known.get(key) is task:
            del self._known[key]

    async def _compile(self, pool: LimitedProcesses, path: str, frame: bytes) -> str | InvalidRequest:
        try:
            answer = await pool.ask(frame, len(frame))  # bytes: the only estimate of the time before it is spent
        except ProcessKilled as error:
            return InvalidRequest.at(path, self._too_complex(error.signal))
        text = answer[1:].decode(errors="replace")
        return text if answer[:1] == ANSWERED else InvalidRequest.at(path, text)

    def _too_complex(self, number: int) -> str:
        if number == signal.SIGPROF:
            seconds = self._settings.max_grammar_seconds
            return f"takes more than {seconds:g} s of CPU time to compile; simplify it, or raise --max-grammar-seconds"
        return "takes too much memory to compile; simplify it"
