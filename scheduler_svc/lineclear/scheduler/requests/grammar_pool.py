"""Validate structured output in child processes with limits, and keep the results."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
from collections import OrderedDict
from pathlib import Path

from lineclear.errors import InvalidRequest, NoStructuredOutput
from lineclear.scheduler.requests.limited_processes import LimitedProcesses, ProcessKilled
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.call_grammar import ForcedCalls
from lineclear.scheduler.text.limited_child import Refused, pack
from lineclear.scheduler.text.schema_to_grammar import FORCED_CALLS
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
        self._max_seconds = settings.max_grammar_seconds
        self.processes: LimitedProcesses | None = None
        if model is not None:
            self.processes = LimitedProcesses(
                "structured output",
                "lineclear.scheduler.text.schema_to_grammar",
                {"model": str(model)},
                cpu_seconds=self._max_seconds,
                max_bytes=8 * settings.max_grammar_bytes + 4096,
                max_waiting=settings.max_queue_size,
                what="forms of structured output are compiled or wait",
            )
        self._known: OrderedDict[bytes, asyncio.Task[str | InvalidRequest]] = OrderedDict()

    @property
    def is_available(self) -> bool:
        """Whether requests may have structured output."""
        return self.processes is not None

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()

    async def grammar(self, form: sampling_pb2.StructuredOutput) -> str:
        """Return the grammar of a validated form.

        Raises InvalidRequest with the reason, NoStructuredOutput, or QueueFull if too many forms wait.
        """
        kind = form.WhichOneof("form") or ""
        content = json.dumps(list(form.choice.texts)) if kind == "choice" else str(getattr(form, kind))
        any_whitespace = form.json_whitespace == sampling_pb2.JSON_WHITESPACE_ANY
        return await self._grammar(
            f"{_FIELD}.{kind}", pack({"kind": kind, "any_whitespace": any_whitespace}, [content])
        )

    async def grammar_of_calls(self, calls: ForcedCalls) -> str:
        """Return the grammar of an answer that must call tools. Raises as `grammar`."""
        return await self._grammar("chat.tools", pack({"kind": FORCED_CALLS}, [calls.packed()]))

    async def _grammar(self, path: str, frame: bytes) -> str:
        if self.processes is None:
            raise NoStructuredOutput(
                "structured output needs a tokenizer of bytes (byte-level BPE, or with byte fallback), which this "
                "model does not have"
            )
        key = hashlib.sha256(frame).digest()
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = asyncio.ensure_future(self._compile(self.processes, path, frame))
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
            return await pool.ask(frame, len(frame))  # bytes: the only estimate of the time before it is spent
        except Refused as refusal:
            reason = str(refusal)
        except ProcessKilled as error:
            reason = "takes too much memory to compile; simplify it"
            if error.signal == signal.SIGPROF:
                took = f"takes more than {self._max_seconds:g} s of CPU time to compile"
                reason = f"{took}; simplify it, or raise --max-grammar-seconds"
        return InvalidRequest.at(path, reason)
