"""Bugs to plant in plans: rows, drafts, step times, suspects, and the choice of a worker. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, boundary, drop, never, off_by_one, replace, swap, without

from lineclear.scheduler.core import placement, request_queue
from lineclear.scheduler.core.core_state import TokenBudget
from lineclear.scheduler.core.drafts import DraftPlan
from lineclear.scheduler.core.placement import Isolation, Placement
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.step_time_model import StepTimeModel

_INDEX = "self._state.adapters.index(request.adapter)"

PLANNER_BUGS: Bugs = {
    StepPlanner: {
        "prompts go before decodes": always("self._state.queue_order.prefill_first"),
        "slots are handed on with the result": drop("self._batch.release_slot(sequence)"),
        "a constrained sequence gives up its slot before its last token": replace(
            "not sequence.request.is_constrained", "True"
        ),
        "a suspect preempts nobody": drop("self._preempt(other)"),
        "the decode batch takes blocks that are not free": without("num_blocks > batch.pool.num_free"),
        "rows with drafts find no block left": replace("num_blocks + drafting.num_blocks", "num_blocks"),
        "a decode step beyond the budget": without("num_rows > tokens_left"),
        "drafts take all the time of a prompt": replace("_DRAFT_SHARE if self._has_prompts() else 1", "4"),
        "a decode keeps its slot": drop("self._finishing += decode_batch.finishing()"),
        "a single decode takes its block one position late": boundary(
            "sequence.num_planned < len(sequence.blocks) * size"
        ),
        "a single decode takes its block one position early": replace(
            "sequence.num_planned < _1 * size", "sequence.num_planned + 1 < _1 * size"
        ),
        "a decode beyond the budget": boundary("self.step.num_tokens >= self._budget"),
        "an older sequence is preempted": replace("s.queue_key > sequence.queue_key", "s is not sequence"),
        "a protected sequence is preempted": without("not s.protected"),
        "a sequence with a row in this step is preempted": replace(
            "_1 and not s.protected and s.planned_step != self.step.step", "_1 and not s.protected"
        ),
        "scores are planned as plain tokens": never("sequence is not None and _"),
        "scores take the whole free chunk": replace(
            "int(free_chunk / cost if is_scored else free_chunk)", "int(free_chunk)"
        ),
        "a prompt waits for the inter-token target": replace("max(free_tokens, _1)", "max(0, _1)"),
        "a step pays no heed to the error of the model": replace("(1 + surplus) / model.error_factor", "1 + surplus"),
        "a sequence with samples in flight is admitted": never("sequence.in_flight > 0"),
        "overtaking is not bounded": never("any(other.overtaken_count >= _ for other in skipped)"),
        "overtaking is not counted": drop("other.overtaken_count += 1"),
        "the tokens left for a prompt are those at position 0": replace("len(shared) * batch.pool.block_size", "0"),
        "a preempted request resumes without its adapter": replace(_INDEX, f"0 if sequence.preemptions else {_INDEX}"),
        "a request of a lost worker continues without its adapter": replace(
            _INDEX, f"0 if sequence.recoveries else {_INDEX}"
        ),
        "a slot names another adapter": off_by_one(_INDEX),
        "the copy is made to the wrong block": replace(
            "zip(donors, taken, strict=False)", "zip(donors, taken[-1:], strict=False)"
        ),
        "an admission beyond the budget": replace(
            "self._add_prompt(sequence, count, tuple(taken))",
            "self._add_prompt(sequence, sequence.num_unplanned, tuple(taken))",
        ),
        "a protected sequence takes only the blocks it needs now": never("sequence.protected"),
        "cached tokens are not counted": drop("state.counters.prefix_cache_hits += start - num_swapped"),
        "siblings count the prompt again": replace("not sequence.request.shares_prompt", "True"),
        "the prompts of later parts of a call do not count": replace(
            "sequence.request.shares_prompt", "sequence.request.is_sibling"
        ),
        "a request keeps the epoch of its first worker": replace("self._worker.epoch", "sequence.epoch or _0"),
        "a chunk keeps its slot": never("sequence.num_planned == sequence.max_len - 1"),
        "a slot is handed on one row early": replace(
            "sequence.num_planned == sequence.max_len - 1", "sequence.num_planned >= sequence.max_len - 2"
        ),
        "prompt blocks are published with the result": drop(
            "self._batch.publish_planned(sequence, step.step, is_prompt=is_prompt)"
        ),
        "scores of a step are not counted": drop("step.num_scored += count"),
        "drafts count as decodes": replace("self._decode_tokens += count", "self._decode_tokens += count + num_drafts"),
        "drafts are not counted in the tokens of the step": drop("step.num_tokens += num_drafts"),
        "a request without output keeps its slot": replace(
            "sequence.num_planned == sequence.max_len - 1", "sequence.num_planned == sequence.max_len"
        ),
        "recomputed tokens are not counted": drop("sequence.recomputed_tokens += again"),
    },
    StepPlanner.run_isolated: {"a suspect keeps its slot": replace("self._end_plan()", "self._batch.pool.end_plan()")},
    DraftPlan: {
        "drafts while another row is in flight": always("not sequence.in_flight"),
        "a draft whose token exceeds max_tokens": off_by_one("sequence.max_len - sequence.num_known - 1"),
        "more drafts than the request allows": replace("min(sequence.request.max_drafts, _1)", "_1"),
        "drafts take the headroom": replace("_1 - batch.headroom", "_1"),
        "drafts take all tokens that are left": replace("_1 // 2", "_1"),
        "a draft without a block": drop(
            "num_drafts = min(num_drafts, len(sequence.blocks) * size - sequence.num_planned - 1)"
        ),
        "a block more than drafts fill": off_by_one("sequence.num_planned + 1 + num_drafts", 16),
    },
    StepTimeModel: {
        "the model is trusted without measurements": never("self.num_observations < _MIN_OBSERVATIONS"),
        "tokens of a chunk do not attend to each other": replace("2 * kv * left", "0.0"),
        "positions of a chunk attend to nothing before them": replace("context + 0.5", "0.5"),
        "a step may have any number of scores": drop(
            "trusted = min(trusted, max(0.0, _MAX_GROWTH * self._most_scored - scored))"
        ),
    },
    TokenBudget: {
        "a second halving has no effect": replace("self._halvings += 1", "self._halvings = 1"),
        "the budget doubles after each step": replace("self._steps_to_doubling == 0", "True"),
    },
    Isolation: {
        "suspects run together": replace("state.poison.isolated_by_age()", "()", role="iter"),
        "a reservation for suspects never ends": drop("state.isolation_epoch, state.is_isolating = None, False"),
        "the next reserved worker pauses its own requests": replace(
            "state.is_isolating and worker.epoch == state.isolation_epoch", "state.is_isolating"
        ),
        "suspects run on the fullest worker": swap("min", "max"),
        "the next suspect runs on another worker": replace("reserved or able", "able"),
        "a suspect waits for a worker that is too small": replace("suspect.max_len <= worker.max_len", "True"),
        "healthy requests pause for a suspect": always("len(_) == 1 or _"),
        "the only worker runs its other requests before the suspect": without("len(state.workers) == 1"),
    },
    PoisonDetector: {
        "a suspect is cleared before the drafts that crashed": drop("reached += sequence.num_drafts"),
        "no request is ever suspected": drop("sequence.crash_count += 1"),
        "a crash beside others is proof": replace("len(in_flight) != 1", "not in_flight"),
        "a first crash is proof": always("sequence.crash_count > 1"),
        "an isolated crash proves nothing": boundary("_ >= 1.0"),
        "a kill counts as much as a crash": always("loss is WorkerLoss.CRASHED"),
        "the youngest suspect goes first": replace("s.queue_key", "(-s.queue_key[0], -s.queue_key[1])"),
        "suspicion never ends": never("s.num_computed >= s.clear_position"),
        "suspicion ends with the first result": always("s.num_computed >= _"),
    },
    Placement: {
        "a member of a group is left to another worker": without("not worker.strategy.fills_batches"),
        "a request stays with the worker that plans first": always("best is None"),
        "a request goes to the slowest worker": replace("other_cost < cost", "other_cost > cost"),
        "a request waits for a better worker for ever": never(
            "sequence.wait_until is not None and self._now >= sequence.wait_until"
        ),
        "an overtaken request is left to another worker": without(
            "sequence.overtaken_count >= self._state.limits.max_queue_overtakes"
        ),
        "a request waits for a worker without step times": without("not in_seconds"),
        "the queue of work is not compared": replace("other.queued_tokens + uncached", "uncached"),
        "tokens of the plan are not counted as work": replace(
            "self._worker.queued_tokens() + planned_tokens", "self._worker.queued_tokens()"
        ),
        "a request is left to a worker without room": always("batch.has_room(...)"),
        "a request is left to a worker that is too small": without("sequence.max_len <= _"),
        "a request is left to a worker whose batch is closed": replace("other.joins_left > 0", "True"),
        "the blocks that growing sequences need are not kept on another worker": replace(
            "batch.headroom + other.blocks_left", "-99"
        ),
        "a request is left to a worker that takes none": without("self._state.takes_requests(worker)"),
    },
    Placement.leaves: {"a started request waits for a worker that is busy": without("sequence.started_at is not None")},
    placement: {"cached prefixes are not compared": replace("len(shared)", "0", times=2)},
    request_queue: {
        "a resuming sequence waits for the strategy": replace("(self._resuming,)", "()"),
        "the queue is passed in two parts": replace("s.queue_key", "-s.queue_key[1]"),
        "only the first of the queue is looked at": replace("found.queue_key", "(float('inf'), 0)"),
    },
    RequestQueue.after: {
        "the first of the queue is passed over": replace("self._keys.after(key)", "self._keys.after(_0 or key)")
    },
}
