"""The rows of a step that verify drafts: which sequences have one, with how many drafts and which blocks."""

from __future__ import annotations

from functools import cached_property

from lineclear.scheduler.core.draft_costs import DraftCosts, TrialBudget
from lineclear.scheduler.core.draft_history import DraftHistory
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.worker_state import WorkerState


class DraftPlan:
    """The sequences of one plan that verify drafts, in the order of planning."""

    def __init__(self, limits: CoreLimits, worker: WorkerState, step: int) -> None:
        self._limits, self._worker, self._step = limits, worker, step
        self._rows: list[tuple[Sequence, int]] = []
        self._trial_cost = 0.0  # of the trials that begin

    def __len__(self) -> int:
        return len(self._rows)

    def takes(self, sequence: Sequence) -> bool:
        """Return whether a sequence that lacks one position stays out of the decode batch for its drafts.

        It gets a row in this step, or in the step after the results of its rows in flight.
        """
        history = sequence.draft_history
        assert history is not None
        if history.paused_until is not None:
            if self._step < history.paused_until:
                self._worker.draft_pauses.add(sequence)
                return False
            history.resume()
        longest = min(sequence.request.max_drafts, sequence.max_len - sequence.num_known - 1)
        if longest <= 0:
            return False
        length = self._chosen_length(history, longest) if self._limits.adaptive_drafts else longest
        if length == 0:
            self._worker.draft_pauses.add(sequence)
            return False
        if not sequence.in_flight:
            self._rows.append((sequence, length))
        return True

    def _chosen_length(self, history: DraftHistory, longest: int) -> int:
        """Return the number of drafts that gains most; with 0, the sequence pauses."""
        length = history.best_length(longest, self._costs)
        if length == 0:
            history.rest(self._step)
        elif history.begins_trial:
            if self._budget.tokens <= self._trial_cost:
                history.postpone(self._step)
                return 0
            self._trial_cost += self._costs.of(length)
        return length

    @cached_property
    def _budget(self) -> TrialBudget:
        budget = self._worker.trial_budget
        budget.earn(self._step, self._num_rows)
        return budget

    @cached_property
    def _costs(self) -> DraftCosts:
        worker, depth = self._worker, self._limits.pipeline_depth
        worker.draft_times.is_used = True
        is_pipelined = depth > 1 and len(worker.batch.decode_batch) > 0
        model, kv_tokens = worker.step_time, worker.batch.num_positions
        return worker.draft_times.costs(model, self._num_rows, kv_tokens, depth, is_pipelined=is_pipelined)

    @cached_property
    def _num_rows(self) -> int:
        batch = self._worker.batch
        return len(batch.decode_batch) + len(batch.not_decoding)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequences need without drafts."""
        return sum(self._needs_block(sequence) for sequence, _ in self._rows)

    @property
    def kv_tokens(self) -> int:
        """Positions that the rows read without drafts."""
        return sum(sequence.num_planned + 1 for sequence, _ in self._rows)

    @property
    def deepest(self) -> int:
        """The largest position of a row."""
        return max(sequence.num_planned for sequence, _ in self._rows)

    def _needs_block(self, sequence: Sequence) -> bool:
        return sequence.num_planned == len(sequence.blocks) * self._worker.batch.pool.block_size

    def next(self, tokens_left: int) -> tuple[Sequence, int, tuple[int, ...]]:
        """Remove the first sequence; return it with the number of its drafts and its new blocks.

        Drafts take at most half of the tokens that are left, and only blocks that no other row needs. No prompt waits
        for them, and nothing is preempted.
        """
        sequence, num_drafts = self._rows.pop(0)
        batch = self._worker.batch
        size, num_needed = batch.pool.block_size, int(self._needs_block(sequence))
        num_spare = max(0, batch.pool.num_free - num_needed - self.num_blocks - batch.headroom)
        num_drafts = min(num_drafts, (tokens_left - 1 - len(self._rows)) // 2)
        num_missing = -(-(sequence.num_planned + 1 + num_drafts) // size) - len(sequence.blocks)
        blocks = batch.pool.take(max(0, min(num_missing, num_needed + num_spare)))
        sequence.blocks += blocks
        num_drafts = min(num_drafts, len(sequence.blocks) * size - sequence.num_planned - 1)
        if num_drafts > 0 and self._limits.adaptive_drafts and sequence.draft_history is not None:
            self._budget.add(-sequence.draft_history.charge(self._costs, num_drafts))
        return sequence, num_drafts, tuple(blocks)
