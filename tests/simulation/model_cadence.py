"""Model of the time of a step: what prompts and drafts may add to the decodes of a plan (I30).

The coefficients are those of the product's StepTimeModel, fed with the work that the oracle counts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence

from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import Row, RowOutput, StepPlan, StepResult

if TYPE_CHECKING:
    from simulation.model_state import ModelState
    from simulation.model_workers import ModelStep, ModelWorker

_ROUNDING = 1 + 1e-9


class Work:
    """Positions that a step computes, the positions that they attend to, and those with a score."""

    def __init__(self, rows: Collection[Row] = (), *, with_drafts: bool = True) -> None:
        self.tokens = self.kv_tokens = self.scored = 0
        for row in rows:
            end = row.start + row.num_tokens + (row.num_drafts if with_drafts else 0)
            self.tokens += end - row.start
            self.kv_tokens += sum(range(row.start + 1, end + 1))
            self.scored += row.num_tokens if row.output is RowOutput.SCORE else 0

    def seconds(self, model: StepTimeModel) -> float:
        base, per_token, per_kv = model.coefficients
        return base + per_token * self.tokens + per_kv * self.kv_tokens + model.seconds_per_scored * self.scored


class ModelCadence:
    """The step-time model of one worker, and the checks of its plans."""

    def __init__(self) -> None:
        self.model = StepTimeModel()
        self.most_tokens = self.most_scored = 0

    def check(
        self,
        plan: StepPlan,
        state: ModelState,
        worker: ModelWorker,
        ready: Collection[ModelSequence],
        partial: Collection[ModelSequence],
        waiting: Collection[ModelSequence],
        budget: int,
    ) -> None:
        """Check a plan: `ready` sequences decode, prompts are `partial` or wait. None of them was suspected."""
        policy, model = state.limits.policy, self.model
        slots = {sequence.slot for sequence in ready}
        started = {init.slot for init in plan.inits}
        decodes = [row for row in plan.rows if row.slot in slots and row.slot not in started]
        prompts = [row for row in plan.rows if row not in decodes]
        if not decodes or not policy.target_inter_token_latency_seconds:
            return
        alone, drafted, all_rows = Work(decodes, with_drafts=False), Work(decodes), Work(plan.rows)
        prompt = Work(prompts)
        is_prompt = bool(partial or waiting)
        computing = sum(sequence.request.max_tokens > 0 for sequence in (*partial, *waiting))
        longest = self._longest(alone, policy.max_prefill_slowdown, max(1, computing))
        longest = min(longest, policy.target_inter_token_latency_seconds)
        cost = model.cost_of_score
        free = min(max(8, alone.tokens), 16)
        is_free = prompt.tokens <= 1 or prompt.tokens + (cost - 1) * prompt.scored <= free * _ROUNDING
        is_within = all_rows.seconds(model) <= longest * _ROUNDING and model.num_observations >= 8
        require(is_free or is_within, "I30", "prompts beside decodes lengthen a step within their shares")
        trusted = is_free or all_rows.tokens <= max(2 * self.most_tokens, alone.tokens + free)
        require(trusted, "I30", "no step is twice as large as a measured one")
        trusted = is_free or prompt.scored <= max(2 * self.most_scored, free)
        require(trusted, "I30", "no step has twice as many scores as a measured one")
        plain = [row for row in decodes if not row.num_drafts]
        if drafted.tokens > alone.tokens and plain and model.is_fitted:
            longest = self._longest(alone, policy.max_prefill_slowdown, 0.5 if is_prompt else 1)
            within = drafted.seconds(model) <= longest * _ROUNDING
            has_plain = any(row in plan.decodes.rows() for row in plain) or any(
                not sequence.request.max_drafts for sequence in ready if sequence.slot in {row.slot for row in plain}
            )
            require(within or not has_plain, "I30", "drafts lengthen the step of other streams no more than a prompt")
        unplanned = [s for s in partial if s.is_running and s.num_unplanned > 0]
        is_starved = unplanned and not prompt.tokens and all_rows.tokens < budget
        require(not is_starved, "I30", "prompts get a token of each step with a token left")

    def _longest(self, alone: Work, slowdown: float, shares: float) -> float:
        """Return how long a step may take where its decodes alone are `alone`."""
        surplus = (slowdown - 1) * shares
        return max(1 + surplus / 2, (1 + surplus) / self.model.error_factor) * alone.seconds(self.model)

    def on_result(self, step: ModelStep, result: StepResult) -> None:
        """Learn from a result: its rows without the drafts that the worker did not make."""
        drafted = dict(zip(step.samples, result.num_drafted or (0,) * len(step.samples), strict=True))
        rows = [row._replace(num_drafts=drafted.get(sequence, 0)) for sequence, row in step.planned]
        work = Work(rows)
        self.most_tokens, self.most_scored = max(self.most_tokens, work.tokens), max(self.most_scored, work.scored)
        self.model.observe(work.tokens, work.kv_tokens, result.step_seconds - result.draft_seconds, work.scored)
