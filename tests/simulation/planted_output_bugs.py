"""Bugs of rows that report scores or a vector."""

from __future__ import annotations

from simulation.mutations import Bug, always, drop, never, off_by_one, replace

from lineclear.scheduler.core import result_applier
from lineclear.scheduler.core.inflight_step import ChunkRow, InflightStep
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.sequence import Request, Sequence

OUTPUT_BUGS = (
    Bug("reported scores are not noted", result_applier._scored, drop("sequence.num_scored = row.end")),
    Bug("an old admission's scores are reported a second time", result_applier._scored, never("row.end <= first")),
    Bug("a scored position is a cache hit", Sequence.num_skippable, never("self.has_scores_left")),
    Bug("the mean leaves out cached positions", Sequence.num_skippable, never("pooling.kind is PoolingKind.MEAN")),
    Bug("a row scores the last prompt token, too", Sequence.next_row, replace("min(end, last)", "end")),
    Bug("a row scores positions before the first", Sequence.next_row, never("self.num_planned < self.num_scored")),
    Bug("reported positions are scored again", Sequence.next_row, replace("self.num_scored", "0"), times=2),
    Bug(
        "the vector is that of the last position of each row",
        Sequence.next_row,
        always("end == self.prompt_len"),
    ),
    Bug(
        "scores of an unfinished request end it",
        result_applier._is_complete,
        replace("row.sequence.has_scores_left", "False"),
    ),
    Bug("a request ends with the first row of its mean", ChunkRow.has_vector, always("_ == self.sequence.prompt_len")),
    Bug("void scores are reported", ResultApplier._restart_readers, drop("sequence.void_admission = _")),
    Bug("a bad score is reported", ResultApplier._report, never("index in bad")),
    Bug(
        "the result's rows are taken in another order",
        InflightStep.outputs,
        replace("self.chunk_rows", "self.chunk_rows[::-1]"),
    ),
    Bug(
        "a request without output keeps its slot", StepPlanner._add, replace("sequence.max_len - 1", "sequence.max_len")
    ),
    Bug("the last position of a vector is not computed", Request.max_len, off_by_one("1", -1)),
    Bug("scores beside samples are taken for bad", result_applier._bad_rows, replace("x.output is _SAMPLE", "True")),
)
