"""A runner without tensors that asserts valid plans. Its answers depend on every cache cell and every parameter.

The "KV cache" holds token ids. The next token is a hash of the whole context *read back through the block table* and of
the parameters, so a wrong block, a stale share, a lost token or a lost parameter changes the answer.
"""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from support.mask_threads import LateThreads
from support.toy import STUCK, fingerprint, sample, score, vector, with_adapter
from support.toy_grammar import ToyGrammars, applied, tokens_of

from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.wire.messages import Hello, Logprobs, Row, RowOutput, Scores, SlotInit, StepPlan, StepResult
from lineclear.worker.loop.runner_interface import InflightStep, Runner
from lineclear.worker.structured_output.grammar_constraints import ConstraintTable, Masks

HOLE = -1
"""Content of a cell before the first write."""


class _Slot:
    def __init__(self, init: SlotInit) -> None:
        self.tokens = list(init.tokens)
        self.blocks = list(init.blocks)
        self.prompt_len = init.prompt_len
        self.sampling = init.sampling
        self.adapter = init.adapter
        self.num_top_scores = init.num_top_scores
        self.pooling = init.pooling
        self.num_known: int | None = None  # tokens that are known, while later ones are void
        self.pooled: list[list[int]] = []  # the contexts of the positions that rows with POOL have computed


class ToyStep:
    is_complete = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class ToyRecorder:
    """A StepRecorder whose trace has a step of one millisecond for each plan."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._num_steps = runner, 0

    def launch(self, plan: StepPlan) -> InflightStep:
        self._num_steps += 1
        return self._runner.launch(plan)

    def write(self) -> int:
        return 0

    def stop(self) -> bytes:
        step = {"ph": "X", "cat": "step", "name": "step", "pid": 1, "tid": 1, "dur": 1000}
        events = [{**step, "ts": 1000 * i} for i in range(self._num_steps)]
        return gzip.compress(json.dumps({"traceEvents": events}).encode())


class ToyRunner:
    """A Runner (lineclear.worker.loop.runner_interface) over integer cells that asserts valid plans.

    `is_bad(context)` returns whether the logits after `context` are non-finite.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        num_slots: int = 8,
        max_model_len: int = 256,
        vocab_size: int = 97,
        max_step_tokens: int = 4096,
        is_bad: Callable[[Sequence[int]], bool] = lambda context: False,
        model: str = "",
        late_per_mille: int = 0,
        num_swap_blocks: int = 0,
        swap_seconds: float = 0.0,
        num_state_snapshots: int | None = None,
    ) -> None:
        """`late_per_mille` of the masks are not ready in each step. `num_state_snapshots`: None without such states."""
        self.num_state_snapshots = num_state_snapshots
        self.late_per_mille = late_per_mille
        self.num_swap_blocks, self.swap_seconds = num_swap_blocks, swap_seconds
        self.num_blocks, self.block_size, self.num_slots = num_blocks, block_size, num_slots
        self.max_model_len, self.vocab_size, self.max_step_tokens = max_model_len, vocab_size, max_step_tokens
        self.is_bad = is_bad
        self.model = model
        self.adapters: dict[int, bytes] = {}  # key by index; they stay when the slots are reset
        self.num_rows = self.num_positions = self.num_samples = 0
        self.bad_drafts: list[tuple[list[int], int]] = []
        """Blocks and position of drafts of the last step behind which the logits are non-finite."""
        self.reset()

    def hello(self, epoch: int) -> Hello:
        return Hello(
            epoch=epoch,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=(0,),
            max_step_tokens=self.max_step_tokens,
            model_id="toy",
            family="toy",
            dtype="int",
            device="toy",
            attention_backend="toy",
            forward_pass="modules",
            forward_pass_reason="it is a toy",
            model_fingerprint=fingerprint(self.model),
            num_swap_blocks=self.num_swap_blocks,
            swap_seconds=self.swap_seconds,
            has_recurrent_state=self.num_state_snapshots is not None,
            num_state_snapshots=self.num_state_snapshots or 0,
        )

    def reset(self) -> None:
        """Forget every slot and every cell."""
        # Arrays of fixed-size integers: lists would grow as ids are written.
        self.cells = [array("i", [HOLE]) * self.block_size for _ in range(self.num_blocks + self.num_swap_blocks)]
        self.slots: dict[int, _Slot] = {}
        # What each state has consumed: the model, and the content of a cell for each position.
        self.states: list[list[int]] = [[] for _ in range(self.num_slots + (self.num_state_snapshots or 0))]
        threads = LateThreads(self.late_per_mille)
        self._constraints = ConstraintTable(ToyGrammars(self.vocab_size), self.vocab_size, threads)

    def idle_work(self) -> bool:
        return False

    def load_adapter(self, index: int, key: bytes, path: str = "") -> None:
        if path and not Path(path).is_dir():
            raise AdapterFilesRefused("there is no such directory")
        self.adapters[index] = key

    def unload_adapter(self, index: int) -> None:
        self.adapters.pop(index, None)

    def prepare(self, grammar: str, done: Callable[[], None]) -> None:
        done()

    def launch(self, plan: StepPlan) -> ToyStep:
        copied = [self.cells[copy.source][: copy.num_positions] for copy in plan.copy_blocks]
        for copy, cells in zip(plan.copy_blocks, copied, strict=True):
            self.cells[copy.target] = cells + array("i", [HOLE]) * (self.block_size - copy.num_positions)
        for block in plan.zero_blocks:
            self.cells[block] = array("i", [HOLE]) * self.block_size
        if self.num_state_snapshots is not None:
            self._start_states(plan)
        for init in plan.inits:
            assert 0 <= init.slot < self.num_slots
            self.slots[init.slot] = _Slot(init)
            self._constraints.set_slot(applied(init))
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot twice in a step"
        assert sum(row.num_tokens + row.num_drafts for row in plan.rows) <= self.max_step_tokens
        self.bad_drafts = []
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        scores: list[Scores] = []
        vectors: list[bytes] = []
        counts: list[int] = []
        drafted: list[int] = []
        bad: set[int] = set()
        stuck: set[int] = set()
        deferred: set[int] = set()
        masks, late, void = self._masks(plan)
        for row in plan.rows:
            slot = self.slots[row.slot]
            slot.blocks.extend(row.new_blocks)
            end = row.start + row.num_tokens
            assert row.num_tokens > 0
            if end == slot.num_known:
                del slot.tokens[end:]
                slot.num_known = None
            assert end <= len(slot.tokens), "a position without a known token"
            assert end <= len(slot.blocks) * self.block_size, "a position without a block"
            for position in range(row.start, end):
                block = slot.blocks[position // self.block_size]
                assert 0 <= block < self.num_blocks
                self.cells[block][position % self.block_size] = slot.tokens[position]
            is_late = row.output == RowOutput.SAMPLE and row.slot in late
            if self.num_state_snapshots is not None:
                self._advance_state(slot, row, is_undone=is_late)
            self.num_rows += 1
            self.num_positions += row.num_tokens
            if row.output == RowOutput.NONE:
                continue
            size = self.block_size
            context = [self.cells[slot.blocks[p // size]][p % size] for p in range(end)]
            if self.num_state_snapshots is not None and not is_late:
                context = self.states[row.slot][1:]
            if self.is_bad(context) and not (row.slot in void and row.output == RowOutput.SAMPLE):
                bad.add(len(counts) + len(scores) + len(vectors))
            if row.output == RowOutput.SCORE:
                scores.append(self._scores(slot, context, row.start))
            elif row.output == RowOutput.POOL:
                vectors.append(self._vector(slot, context, row.start))
            else:
                assert end == len(slot.tokens), "a sample before the last known token"
                self.num_samples += 1
                masked = masks.get(row.slot)
                sampling = slot.sampling
                token, reported = sample(context, sampling, slot.prompt_len, self.vocab_size, self._model(slot), masked)
                if token == STUCK:
                    token = 0
                    stuck |= {len(counts) + len(scores) + len(vectors)} - bad
                if row.slot in late:
                    deferred.add(len(counts) + len(scores) + len(vectors))
                    slot.num_known = slot.num_known or end
                    token = (token + 1) % self.vocab_size
                drafts = [] if masks or late else self._drafts(slot, row.num_drafts)
                found = [(token, reported), *self._verify(slot, drafts, context, token)]
                slot.tokens += [token for token, _ in found]
                tokens += [token for token, _ in found]
                logprobs += [reported for _, reported in found]
                counts.append(len(found))
                drafted.append(len(drafts))
        asked = any(entry is not None for entry in logprobs)
        return ToyStep(
            StepResult(
                plan.epoch,
                plan.step,
                tuple(tokens),
                tuple(logprobs) if asked else (),
                frozenset(bad),
                counts=tuple(counts) if any(drafted) else (),
                scores=tuple(scores),
                vectors=tuple(vectors),
                num_drafted=tuple(drafted) if any(drafted) else (),
                stuck_rows=frozenset(stuck),
                deferred_rows=frozenset(deferred),
            )
        )

    def _start_states(self, plan: StepPlan) -> None:
        """Copy states, first all reads, and start the other new slots with the zero state."""
        new, targets = {init.slot for init in plan.inits}, {copy.target for copy in plan.copy_states}
        assert len(targets) == len(plan.copy_states), "a state replaced twice"
        assert all(target in new or target >= self.num_slots for target in targets), (
            "the state of a slot in use replaced"
        )
        copied = [self.states[copy.source] for copy in plan.copy_states]
        for slot in new - targets:
            self.states[slot] = []
        for copy, state in zip(plan.copy_states, copied, strict=True):
            self.states[copy.target] = list(state)

    def _advance_state(self, slot: _Slot, row: Row, *, is_undone: bool) -> None:
        """Consume the cells of a row, which must continue from the state of exactly the positions before it.

        The state stays if `is_undone`, as a worker brings it back. Later rows of the slot are void.
        """
        if is_undone:
            assert row.num_tokens == 1, "a state that cannot be brought back"
            return
        size, end = self.block_size, row.start + row.num_tokens
        cells = [self.cells[slot.blocks[p // size]][p % size] for p in range(end)]
        model = [zlib.crc32(self._model(slot).encode())]
        before = self.continued(self.states[row.slot], model + cells[: row.start] if row.start else [])
        assert not row.num_drafts, "drafts cannot be taken back from a state"
        self.states[row.slot] = (before or model) + cells[row.start :]

    def continued(self, state: list[int], cells: list[int]) -> list[int]:
        """Return what a row continues from, the state of its slot: it has consumed the cells before the row."""
        assert state == cells, "a row from the state of other positions"
        return state

    def _masks(self, plan: StepPlan) -> tuple[dict[int, set[int]], set[int], set[int]]:
        """Return the tokens that the grammar of each sampling slot allows, the slots without a mask, and void slots.

        A step with constrained rows verifies no drafts.
        """
        rows = [row for row in plan.rows if row.output == RowOutput.SAMPLE]
        slots, ends = [row.slot for row in rows], [row.start + row.num_tokens for row in rows]

        def last_tokens(indices: list[int]) -> Callable[[], list[int]]:
            return lambda: [self.slots[slots[index]].tokens[-1] for index in indices]

        singles = {row.slot for row in rows if row.num_tokens == 1}
        pending = self._constraints.start(
            slots, ends, last_tokens, None if self.num_state_snapshots is None else singles
        )
        masks = Masks([], np.zeros((0, 0), np.uint32)) if pending is None else pending.result()
        assert not any(rows[row].num_drafts for row in masks.rows), "a request with a grammar has no drafts"
        found = {slots[row]: tokens_of(masks.bits, i, self.vocab_size) for i, row in enumerate(masks.rows)}
        return found, {slots[row] for row in masks.deferred}, {slots[row] for row in masks.void}

    def _model(self, slot: _Slot) -> str:
        return with_adapter(self.model, self.adapters[slot.adapter]) if slot.adapter else self.model

    def _drafts(self, slot: _Slot, most: int) -> list[int]:
        """Return up to `most` drafts; how many and how good they are depends on the seed and the position."""
        known, seed = list(slot.tokens), slot.sampling.seed
        quality = (0.0, 0.5, 0.9, 1.0)[seed % 4]
        number = hash((seed, len(known))) % 1009
        for i in range(number % (most + 1)):
            right, _ = sample(known, slot.sampling, slot.prompt_len, self.vocab_size, self._model(slot))
            is_right = hash((number, i)) % 100 < 100 * quality
            known.append(right if is_right else (right + 1) % self.vocab_size)
        return known[len(slot.tokens) :]

    def _verify(
        self, slot: _Slot, drafts: list[int], context: list[int], token: int
    ) -> list[tuple[int, Logprobs | None]]:
        """Compute the drafts behind `context`, and return the samples behind those that equal their samples."""
        size, end = self.block_size, len(context)
        for position, draft in enumerate(drafts, end):
            assert position // size < len(slot.blocks), "a draft without a block"
            self.cells[slot.blocks[position // size]][position % size] = draft
        self.num_positions += len(drafts)
        found: list[tuple[int, Logprobs | None]] = []
        is_bad = self.is_bad(context)
        for position, draft in enumerate(drafts, end):
            seen = [self.cells[slot.blocks[p // size]][p % size] for p in range(position + 1)]
            if not is_bad and self.is_bad(seen):
                self.bad_drafts.append((slot.blocks, position))
                is_bad = True
            if is_bad or draft != token:
                break
            found.append(sample(seen, slot.sampling, slot.prompt_len, self.vocab_size, self._model(slot)))
            token = found[-1][0]
        return found

    def _scores(self, slot: _Slot, context: list[int], start: int) -> Scores:
        """Return the scores of the positions from `start` to the end of the context."""
        assert len(context) < len(slot.tokens), "a score of an unknown token"
        found = [
            score(context[: p + 1], slot.tokens[p + 1], slot.num_top_scores, self.vocab_size, self._model(slot))
            for p in range(start, len(context))
        ]
        columns = (tuple(value for row in found for value in row[field]) for field in range(3))
        return Scores(*columns)

    def _vector(self, slot: _Slot, context: list[int], start: int) -> bytes:
        """Return the vector of a sequence with its last position, nothing before."""
        assert slot.pooling is not None, "a vector of a sequence that has none"
        slot.pooled += [context[: p + 1] for p in range(start, len(context))]
        return vector(slot.pooled, slot.pooling, self._model(slot)) if len(context) == len(slot.tokens) else b""
