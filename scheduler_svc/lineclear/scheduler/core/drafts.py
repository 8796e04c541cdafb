"""Which sequences verify drafts, and the rows that do (speculative decoding, Leviathan et al. 2023).

A row with drafts computes several positions and samples at each. It returns the leading drafts that equal their samples
and one token more. A sample depends on logits, seed and position only, so the tokens are those of plain decoding.

The length of a sequence with drafts in flight is unknown, so it has one row in flight and is not in the decode batch.
Its last rows say how likely a draft is accepted behind accepted ones, and so how many drafts give most tokens for what
they cost. A sequence verifies them as long as that is more than it gets without. Else it rests in the decode batch. The
one that rests longest tries one row when the worker has enough credit for it.
"""

from __future__ import annotations

from functools import cached_property

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import StepResult

_MEMORY = 7 / 8
"""Weight of a row beside the next one of its sequence."""
_TRIAL_HITS, _TRIAL_TRIES = 0.5, 1.0
"""What a trial begins with: one draft, as likely accepted as not."""
_TIME_WEIGHT = 1 / 16
"""Of the newest step in a mean of times."""
_TRIAL_DRAFTS = 4
"""At most, of a row on trial: eight would cost twice the credit and say little more."""
_CREDIT_SHARE, _FIRST_CREDIT, _MAX_CREDIT = 0.01, 3.0, 6.0
"""What drafts may lose: of the tokens of the rows, and in tokens, at first and at most."""
_MAX_ROWS, _MAX_UNFITTED_ROWS = 64, 4
"""Running sequences above which none verifies drafts: the processor is busy without. Fewer until steps are measured."""
_UNFITTED_COST = 0.1
"""Cost of a draft until steps are measured."""


class DraftCosts:
    """What drafts cost on one worker beside the positions of the step-time model, and what they may still lose."""

    __slots__ = ("_seconds_beyond", "_seconds_per_draft", "credit", "per_draft")

    def __init__(self) -> None:
        self.credit = _FIRST_CREDIT  # tokens that drafts gained, and a share of all, less what they cost
        self.per_draft = _UNFITTED_COST  # cost of a draft when it was last computed, in tokens
        self._seconds_per_draft = 0.0  # to make one
        self._seconds_beyond = [0.0, 0.0]  # from result to result, beyond the step: without drafts, and with drafts

    def observe_step(self, result: StepResult, seconds: float, *, has_drafts: bool) -> None:
        """Learn from a step whose result took `seconds`, from the result before it, or from its plan if none was ahead.

        A pause of the machine counts at most as long as the step.
        """
        beyond = min(max(0.0, seconds - result.step_seconds), result.step_seconds)
        self._seconds_beyond[has_drafts] += _TIME_WEIGHT * (beyond - self._seconds_beyond[has_drafts])
        if num_drafted := sum(result.num_drafted):
            each = result.draft_seconds / num_drafted
            self._seconds_per_draft += _TIME_WEIGHT * (each - self._seconds_per_draft)

    def observe_row(self, sequence: Sequence, num_allowed: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from a row of `sequence` that might verify `num_allowed` drafts. Those not found cost nothing."""
        returned = num_accepted + (num_allowed - num_drafted) * self.per_draft
        self.credit = min(self.credit + returned, _MAX_CREDIT)
        sequence.draft_hits = sequence.draft_hits * _MEMORY + num_accepted
        sequence.draft_tries = sequence.draft_tries * _MEMORY + num_accepted + (num_accepted < num_drafted)

    def earn(self, num_rows: int) -> None:
        """Add the share of a step."""
        self.credit = min(self.credit + _CREDIT_SHARE * num_rows, _MAX_CREDIT)

    def of_row(self, model: StepTimeModel, rows: int, kv_tokens: int, missed: float) -> tuple[float, float]:
        """Return what a row with drafts costs, and each of its drafts, in tokens that the step yields without drafts.

        The step has so many `rows`, which read `kv_tokens` positions. `missed` plans have no row of the sequence.
        """
        if rows > (_MAX_ROWS if model.is_fitted else _MAX_UNFITTED_ROWS):
            return float("inf"), 0.0
        self.per_draft = _UNFITTED_COST
        if not model.is_fitted:
            return missed, self.per_draft
        _, per_token, per_kv = model.coefficients
        plain, drafting = self._seconds_beyond
        per_row_token = (model.predict(rows, kv_tokens) + plain) / rows
        self.per_draft = (per_token + self._seconds_per_draft + kv_tokens / rows * per_kv) / per_row_token
        return missed + max(0.0, drafting - plain) / per_row_token, self.per_draft


class DraftPlan:
    """The sequences of one plan that verify drafts, in the order of planning."""

    def __init__(self, limits: CoreLimits, batch: RunningBatch, model: StepTimeModel, costs: DraftCosts) -> None:
        self._limits, self._batch, self._model, self._costs = limits, batch, model, costs
        self._is_off = batch.pool.states is not None  # a recurrent state cannot go back to before a rejected draft
        self._rows: list[tuple[Sequence, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def next_trial(self) -> Sequence | None:
        """Return the member of the decode batch that rests longest, if it may try drafts now."""
        decodes = self._batch.decode_batch
        if self._is_off or not self._limits.adaptive_drafts:
            return None
        self._costs.earn(len(decodes))
        # Its row has room for a draft: two tokens are left to sample behind those that are planned.
        found = next((s for s in decodes.resting if s.max_len - s.decode_offset > decodes.decode_step + 3), None)
        return found if found is not None and self._has_credit_for(found.request.max_drafts) else None

    def takes(self, sequence: Sequence) -> bool:
        """Return whether a sequence that lacks one position stays out of the decode batch for its drafts.

        It gets a row in this step, or in the step after the results of its rows in flight.
        """
        num_drafts = min(sequence.request.max_drafts, sequence.max_len - sequence.num_known - 1)
        if num_drafts <= 0 or self._is_off:
            return False
        if self._limits.adaptive_drafts and not (num_drafts := self._num_that_pay(sequence, num_drafts)):
            return False
        if not sequence.in_flight:
            self._rows.append((sequence, num_drafts))
        return True

    def _num_that_pay(self, sequence: Sequence, longest: int) -> int:
        """Return how many drafts `sequence` verifies now, in a trial too; 0 if it rests."""
        if not sequence.draft_tries:
            if not self._has_credit_for(longest):
                return 0
            self._costs.credit -= self._cost(min(longest, _TRIAL_DRAFTS))
            sequence.draft_hits, sequence.draft_tries = _TRIAL_HITS, _TRIAL_TRIES
        if sequence.draft_tries == _TRIAL_TRIES:
            return min(longest, _TRIAL_DRAFTS)
        number = self._best(sequence.draft_hits / sequence.draft_tries, longest)
        if not number:
            sequence.draft_hits = sequence.draft_tries = 0.0  # its next row decides anew
        return number

    def _has_credit_for(self, longest: int) -> bool:
        """Return whether a sequence may try that many drafts or fewer."""
        return self._costs.credit >= self._cost(min(longest, _TRIAL_DRAFTS))

    def _best(self, chance: float, longest: int) -> int:
        """Return the number of drafts that gives most tokens for their cost; 0 if no drafts do.

        `chance` is that of a draft to be accepted behind accepted ones.
        """
        best, best_rate, tokens, likely = 0, 0.0, 1.0, 1.0
        for number in range(1, longest + 1):
            likely *= chance
            tokens += likely
            rate = tokens / (1.0 + self._cost(number))
            if rate <= best_rate:
                break  # each further draft gives less than the one before
            best, best_rate = number, rate
        return best if best_rate > 1.0 else 0

    def _cost(self, num_drafts: int) -> float:
        per_row, per_draft = self._cost_of_row
        return per_row + num_drafts * per_draft

    @cached_property
    def _cost_of_row(self) -> tuple[float, float]:
        batch = self._batch
        # Beside sequences that are planned ahead, one with a row in flight misses the other plans of the pipeline.
        missed = self._limits.pipeline_depth - 1.0 if batch.decode_batch else 0.0
        rows = len(batch.decode_batch) + len(batch.not_decoding)
        return self._costs.of_row(self._model, rows, batch.num_positions, missed)

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
        return sequence.num_planned == len(sequence.blocks) * self._batch.pool.block_size

    def next(self, tokens_left: int) -> tuple[Sequence, int, tuple[int, ...]]:
        """Remove the first sequence; return it with the number of its drafts and its new blocks.

        Drafts take at most half of the tokens that are left, and only blocks that no other row needs. No prompt waits
        for them, and nothing is preempted.
        """
        sequence, num_drafts = self._rows.pop(0)
        batch = self._batch
        size, num_needed = batch.pool.block_size, int(self._needs_block(sequence))
        num_spare = max(0, batch.pool.num_free - num_needed - self.num_blocks - batch.headroom)
        num_drafts = min(num_drafts, (tokens_left - 1 - len(self._rows)) // 2)
        num_missing = -(-(sequence.num_planned + 1 + num_drafts) // size) - len(sequence.blocks)
        blocks = batch.pool.take(max(0, min(num_missing, num_needed + num_spare)))
        sequence.blocks += blocks
        num_drafts = min(num_drafts, len(sequence.blocks) * size - sequence.num_planned - 1)
        if num_drafts > 0 and self._limits.adaptive_drafts and sequence.draft_tries != _TRIAL_TRIES:
            self._costs.credit -= self._cost(num_drafts)  # a trial was charged when it began
        return sequence, num_drafts, tuple(blocks)
