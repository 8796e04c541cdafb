"""Bugs to plant in the rows that verify drafts and in their results. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, always, drop, never, off_by_one, replace, without

from lineclear.scheduler.core import result_applier, running_batch
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.drafts import DraftPlan
from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.sequence import Sequence

DRAFT_BUGS = (
    Bug("drafts while another row is in flight", DraftPlan.takes, always("not sequence.in_flight")),
    Bug(
        "a draft whose token exceeds max_tokens",
        DraftPlan.takes,
        off_by_one("sequence.max_len - sequence.num_known - 1"),
    ),
    Bug(
        "more drafts than the request allows",
        DraftPlan.takes,
        replace("min(sequence.request.max_drafts, _1)", "_1"),
    ),
    Bug("drafts take the headroom", DraftPlan.next, replace("_1 - batch.headroom", "_1")),
    Bug("drafts take all tokens that are left", DraftPlan.next, replace("_1 // 2", "_1")),
    Bug(
        "a draft without a block",
        DraftPlan.next,
        drop("num_drafts = min(num_drafts, len(sequence.blocks) * size - sequence.num_planned - 1)"),
    ),
    Bug(
        "a block more than drafts fill",
        DraftPlan.next,
        off_by_one("sequence.num_planned + 1 + num_drafts", 16),
    ),
    Bug(
        "drafts are not counted in the tokens of the step",
        StepPlanner._add,
        drop("self.num_tokens += num_drafts"),
    ),
    Bug(
        "rows with drafts find no block left",
        StepPlanner._plan_decodes,
        replace("num_blocks + drafting.num_blocks", "num_blocks"),
    ),
    Bug(
        "a sequence is planned on while its drafts are in flight",
        Sequence.num_unplanned,
        never("self.num_drafts"),
    ),
    Bug("a preempted sequence keeps its drafts", running_batch._reset_sequence, drop("sequence.num_drafts = 0")),
    Bug("tokens behind the end of an answer count", ResultApplier._append_row, never("sequence.has_stopped")),
    Bug(
        "accepted drafts are not known",
        ResultApplier._append_row,
        drop("sequence.num_known += num_accepted"),
    ),
    Bug(
        "accepted drafts are computed again",
        ResultApplier._append_row,
        replace("sequence.num_known - 1", "sequence.num_planned"),
    ),
    Bug("rows with drafts count as computed up to their start", ResultApplier.apply, without("row.num_drafts")),
    Bug(
        "every token of the step belongs to the first row with drafts",
        result_applier._sampling_chunks,
        drop("first += count"),
    ),
    Bug(
        "drafts behind the end of an answer count as accepted",
        ResultApplier._append_row,
        replace("sample - samples.start", "len(samples) - 1"),
    ),
    Bug("more tokens than drafts are accepted", InflightStep._check_counts, never("not all(_)")),
    Bug(
        "a suspect is cleared before the drafts that crashed",
        PoisonDetector.record_crash,
        drop("reached += sequence.num_drafts"),
    ),
    Bug("a sequence rests after it left the decode batch", DecodeBatch.leave, drop("self.resting.pop(sequence, None)")),
)
