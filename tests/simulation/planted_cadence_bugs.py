"""Bugs to plant in what prompts and drafts may add to a step. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, drop, never, replace

from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.step_time_model import StepTimeModel

CADENCE_BUGS = (
    Bug(
        "each embedding adds a share",
        RequestQueue.num_with_output,
        replace("len(self._live) - self.num_without_output", "len(self._live)"),
    ),
    Bug(
        "a step pays no heed to the error of the model",
        StepPlanner._seconds_beside,
        replace("(1 + surplus) / model.error_factor", "1 + surplus"),
    ),
    Bug(
        "scores are planned as plain tokens",
        StepPlanner._prompt_tokens_left,
        never("sequence is not None and _"),
    ),
    Bug(
        "scores take the whole free chunk",
        StepPlanner._prompt_tokens_left,
        replace("int(free_chunk / cost if is_scored else free_chunk)", "int(free_chunk)"),
    ),
    Bug("scores of a step are not counted", StepPlanner._add, drop("self.num_scored += count")),
    Bug(
        "drafts take all the time of a prompt",
        StepPlanner._plan_drafts,
        replace("_DRAFT_SHARE if self._has_prompts() else 1", "4"),
    ),
    Bug(
        "drafts count as decodes",
        StepPlanner._add,
        replace("self._decode_tokens += count", "self._decode_tokens += count + num_drafts"),
    ),
    Bug("scores are measured as plain tokens", ResultApplier.apply, replace("inflight.num_scored", "0")),
    Bug(
        "the model is trusted without measurements",
        StepTimeModel.chunk_within,
        never("self.num_observations < _MIN_OBSERVATIONS"),
    ),
    Bug("tokens of a chunk do not attend to each other", StepTimeModel.chunk_within, replace("2 * kv * left", "0.0")),
    Bug(
        "positions of a chunk attend to nothing before them",
        StepTimeModel.chunk_within,
        replace("context + 0.5", "0.5"),
    ),
    Bug(
        "a step may have any number of scores",
        StepTimeModel.chunk_within,
        drop("trusted = min(trusted, max(0.0, _MAX_GROWTH * self._most_scored - scored))"),
    ),
)
