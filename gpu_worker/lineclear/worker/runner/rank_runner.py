"""Runners of a worker with tensor parallelism: that of rank 0 sends each call to the other ranks, which follow it.

Sampling is a pure function of logits, seed and position, and every rank has the same logits, so all ranks draw the same
tokens. Only two results depend on more: which masks of grammars are ready in time, and drafts, which may come from a
model that rank 0 alone holds. Rank 0 sends both, in the order in which a step asks for them.

With each call, rank 0 sends a digest of the tokens that it has on the host. A rank compares it with that of its own
tokens once it has them on the host, too: no step waits for them.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import structlog

from lineclear.exit_codes import ExitCode
from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.process.exception_location import exception_fields
from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import (
    Hello,
    LoadAdapter,
    Message,
    Rejoin,
    Row,
    SlotInit,
    StepErrorKind,
    StepPlan,
    StepResult,
    UnloadAdapter,
)
from lineclear.worker.drafts.verification import Drafter, Drafts
from lineclear.worker.loop.runner_interface import InflightStep, StepFailed
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.structured_output.grammar_constraints import ConstraintTable, Grammars, Masks, PendingMasks
from lineclear.worker.tensor_parallel.ranks import Kind, OutOfStep, Ranks

from .launched_step import LaunchedStep
from .model_runner import ModelRunner, RunnerOptions

log = structlog.get_logger(__name__)

_NO_EPOCH = 0  # the ranks live no longer than their worker
_IDLE_SECONDS = 0.05
"""Time without a message after which a rank does idle work."""
_DIGEST = struct.Struct("<QI")  # number of steps, CRC-32 of their tokens


class LeadingRunner(ModelRunner):
    def __init__(
        self,
        ranks: Ranks,
        loaded: LoadedModel,
        options: RunnerOptions,
        draft_model: LoadedModel | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__(loaded, options, draft_model=draft_model, graphs=graphs)
        self._ranks = ranks
        self._draws = _Draws()
        self._constraints = _LeadingConstraints(ranks, self._grammars, loaded.vocab_size)
        self._constraints.may_defer = not loaded.recurrent

    def hello(self, epoch: int) -> Hello:
        """See ModelRunner. The device names the number of ranks."""
        hello = super().hello(epoch)
        return replace(hello, device=f"{hello.device} x {self._ranks.count}")

    def reset(self) -> None:
        self._call(Rejoin(_NO_EPOCH))
        super().reset()

    def launch(self, plan: StepPlan) -> InflightStep:
        """Run the plan on all ranks. Raises StepFailed; the other ranks may then wait for this one, so it must end."""
        self._call(plan)
        try:
            return _LeadingStep(super().launch(plan), self._draws)
        except StepFailed as failed:
            self._ranks.end_if_lost()
            raise _for_all(failed) from failed

    def load_adapter(self, index: int, key: bytes, path: str) -> None:
        """Hold the adapter on all ranks. Raises AdapterFilesRefused if one of them refuses it; then none holds it."""
        self._call(LoadAdapter(_NO_EPOCH, index, key, path))
        problem = _refusal(super().load_adapter, index, key, path)
        problems = [x for x in (problem, *(answer.decode() for answer in self._ranks.answers())) if x]
        if problems:
            self.unload_adapter(index)
            raise AdapterFilesRefused(problems[0])

    def unload_adapter(self, index: int) -> None:
        self._call(UnloadAdapter(_NO_EPOCH, index))
        super().unload_adapter(index)

    def _drafts(self, rows: Sequence[Row]) -> Drafts:
        drafts = super()._drafts(rows)
        self._ranks.send(Kind.DRAFTS, json.dumps([(slot, list(tokens)) for slot, tokens in drafts.items()]).encode())
        return drafts

    def _call(self, message: Message) -> None:
        self._ranks.send(Kind.CALL, _DIGEST.pack(*self._draws.digest) + encode(message))


def _for_all(failed: StepFailed) -> StepFailed:
    """Return a failure that ends the worker: after a lack of memory it would go on."""
    is_memory = failed.kind is StepErrorKind.OUT_OF_MEMORY
    return StepFailed(StepErrorKind.EXCEPTION, failed.summary) if is_memory else failed


class _Draws:
    """A digest of the tokens of all steps so far."""

    def __init__(self) -> None:
        self.digest = 0, 0
        """Number of steps, and CRC-32 of their tokens. One thread adds, another may read."""

    def add(self, result: StepResult) -> None:
        num_steps, crc = self.digest
        self.digest = num_steps + 1, zlib.crc32(array("q", (*result.tokens, *result.counts)), crc)


class _LeadingStep:
    """A step of rank 0, whose tokens are added to the digest."""

    def __init__(self, step: InflightStep, draws: _Draws) -> None:
        self.is_complete = step.is_complete
        self._step, self._draws = step, draws

    def result(self) -> StepResult:
        try:
            result = self._step.result()
        except StepFailed as failed:
            raise _for_all(failed) from failed
        self._draws.add(result)
        return result


class FollowingRunner(ModelRunner):
    def __init__(
        self, ranks: Ranks, loaded: LoadedModel, options: RunnerOptions, graphs: DecodeGraphs | None = None
    ) -> None:
        super().__init__(loaded, options, drafter=Drafter(), graphs=graphs)
        self._ranks = ranks
        self._constraints = _FollowingConstraints(ranks, self._grammars, loaded.vocab_size)

    def _drafts(self, rows: Sequence[Row]) -> Drafts:
        return {slot: list(tokens) for slot, tokens in json.loads(self._ranks.receive(Kind.DRAFTS))}


def follow(runner: ModelRunner, ranks: Ranks) -> ExitCode:
    """Make each call that rank 0 makes, until rank 0 exits or a call fails. Return the exit code."""
    draws = _FollowingDraws()
    while True:
        if not ranks.has_message(_IDLE_SECONDS):
            while runner.idle_work() and not ranks.has_message(0):
                pass
        try:
            message = ranks.receive(Kind.CALL)
            draws.compare(_DIGEST.unpack_from(message))
            _make_call(runner, ranks, decode(message[_DIGEST.size :]), draws)
        except EOFError:
            return ExitCode.OK
        except OutOfStep as error:
            log.error("rank_out_of_step", rank=ranks.rank, problem=str(error))
            return ExitCode.INTERNAL
        except Exception as error:  # this rank lacks a step: the worker must end
            ranks.end_if_lost()
            log.error("rank_failed", rank=ranks.rank, **exception_fields(error))
            return ExitCode.INTERNAL


class _FollowingDraws(_Draws):
    """The tokens of another rank, which are those of rank 0, or the rank must end: their keys and values differ."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = deque[LaunchedStep]()
        """Launched, and not yet in the digest."""
        self._wanted = self.digest

    def compare(self, wanted: tuple[int, ...]) -> None:
        """Compare with a digest of rank 0, or a later one in a later call, if the device has not finished its steps."""
        if self._wanted[0] == self.digest[0]:
            self._wanted = wanted[0], wanted[1]
        while self.digest[0] < self._wanted[0] and self.steps[0].is_over():
            self.add(self.steps.popleft().result())
        if self.digest[0] == self._wanted[0] and self.digest != self._wanted:
            raise OutOfStep(f"the tokens of its first {self._wanted[0]} steps are not those of rank 0")


def _make_call(runner: ModelRunner, ranks: Ranks, message: Message, draws: _FollowingDraws) -> None:
    if isinstance(message, StepPlan):
        draws.steps.append(cast(LaunchedStep, runner.launch(message)))
    elif isinstance(message, LoadAdapter):
        ranks.answer(_refusal(runner.load_adapter, message.index, message.key, message.path).encode())
    elif isinstance(message, UnloadAdapter):
        runner.unload_adapter(message.index)
    else:
        assert isinstance(message, Rejoin), message
        runner.reset()


def _refusal(load: Callable[[int, bytes, str], None], index: int, key: bytes, path: str) -> str:
    """Return why `load` refuses an adapter or fails, which a rank alone may do; empty if it holds it."""
    try:
        load(index, key, path)
    except AdapterFilesRefused as error:
        return str(error)
    except Exception as error:
        log.error("adapter_failed", **exception_fields(error))
        return f"the worker cannot load it: {type(error).__name__}"
    return ""


class _LeadingConstraints(ConstraintTable):
    """Sends the masks of each step to the other ranks. With recurrent states, a step waits for all masks."""

    def __init__(self, ranks: Ranks, grammars: Grammars, vocab_size: int) -> None:
        super().__init__(grammars, vocab_size)
        self._ranks = ranks

    def start(self, slots: Sequence[int], *arguments: Any) -> PendingMasks | None:
        pending = super().start(slots, *arguments)
        return None if pending is None else PendingMasks(lambda: self._send(pending.result()))

    def _send(self, masks: Masks) -> Masks:
        rows, deferred, void = ([int(row) for row in part] for part in (masks.rows, masks.deferred, masks.void))
        self._ranks.send(Kind.MASKS, json.dumps((rows, masks.bits.tobytes().hex(), deferred, void)).encode())
        return masks


class _FollowingConstraints(ConstraintTable):
    """Receives the masks of each step from rank 0."""

    def __init__(self, ranks: Ranks, grammars: Grammars, vocab_size: int) -> None:
        super().__init__(grammars, vocab_size)
        self._ranks = ranks

    def set_slot(self, init: SlotInit) -> None:
        constraint: Any = None  # it is on rank 0
        if init.sampling.grammar:
            self.slots[init.slot] = constraint
        else:
            self.slots.pop(init.slot, None)

    def start(self, slots: Sequence[int], *_: Any) -> PendingMasks | None:
        return None if self.slots.keys().isdisjoint(slots) else PendingMasks(self._receive)

    def _receive(self) -> Masks:
        rows, bits, deferred, void = json.loads(self._ranks.receive(Kind.MASKS))
        array = np.frombuffer(bytearray.fromhex(bits), np.uint32)
        return Masks(rows, array.reshape(len(rows), self._num_words), deferred, void)
