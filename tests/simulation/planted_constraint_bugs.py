"""Bugs of requests with grammars: in the core, in the worker's constraints, and in the preparation of grammars."""

from __future__ import annotations

from simulation.mutations import Bug, drop, never, replace, without

from lineclear.scheduler.core import result_applier
from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.engine.grammar_preparation import GrammarPreparation
from lineclear.worker.constraints import ConstraintTable, _Constraint

CONSTRAINT_BUGS = (
    Bug("a stuck row has a token", ResultApplier.apply, replace("bad | result.stuck_rows", "bad")),
    Bug("a stuck row fails with another error", ResultApplier._fail, never("row in result.stuck_rows")),
    Bug(
        "a stuck row taints its blocks",
        ResultApplier._fail,
        replace("_1.fail(sequence, _stuck_row(), now)", "_1.fail(sequence, _stuck_row(), now, tainted=True)"),
    ),
    Bug(
        "a stuck decode stays in the decode batch",
        ResultApplier._append_tokens,
        replace("failed | result.deferred_rows if result.deferred_rows else failed", "result.bad_rows"),
    ),
    Bug("the token of a stuck row counts", result_applier._bad_rows, replace("outside - result.stuck_rows", "outside")),
    Bug(
        "a stuck row beyond the outputs is accepted",
        InflightStep.check,
        replace(
            "(*result.bad_rows, *result.stuck_rows, *result.deferred_rows)", "(*result.bad_rows, *result.deferred_rows)"
        ),
    ),
    Bug(
        "a deferred row beyond the outputs is accepted",
        InflightStep.check,
        replace(
            "(*result.bad_rows, *result.stuck_rows, *result.deferred_rows)", "(*result.bad_rows, *result.stuck_rows)"
        ),
    ),
    Bug("a deferred row has a token", ResultApplier._append_tokens, never("row in result.deferred_rows")),
    Bug(
        "a deferred decode stays in the decode batch",
        ResultApplier._append_tokens,
        replace("failed | result.deferred_rows if result.deferred_rows else failed", "failed"),
    ),
    Bug("rows behind a deferred one count", ResultApplier._defer, replace("sequence.in_flight", "0")),
    Bug(
        "a deferred position is not planned again",
        ResultApplier._defer,
        drop("sequence.num_planned = sequence.num_computed = _"),
    ),
    Bug(
        "positions behind a deferred one count as computed before",
        ResultApplier._defer,
        drop("sequence.max_computed_before = _"),
    ),
    Bug(
        "a deferred position counts as computed",
        ResultApplier.apply,
        replace("row.num_drafts or sequence.num_void or row.end > sequence.num_planned", "row.num_drafts"),
    ),
    Bug("a sequence is planned behind a void sample", Sequence.num_unplanned, without("self.num_void")),
    Bug(
        "a constrained sequence gives up its slot before its last token",
        StepPlanner._release_slots,
        replace("not sequence.request.is_constrained", "True"),
    ),
    Bug(
        "a block whose last position may be deferred is published",
        RunningBatch.publish_planned,
        replace("int(sequence.request.is_constrained)", "0"),
    ),
    Bug("a slot keeps the constraint of its last sequence", ConstraintTable.set_slot, drop("self.slots.pop(_, None)")),
    Bug(
        "tokens of a slot's initialisation are not matched",
        _Constraint.__init__,
        replace("list(init.tokens[init.prompt_len :])", "[]"),
    ),
    Bug(
        "the prompt is matched, too",
        _Constraint.__init__,
        replace("init.tokens[init.prompt_len :]", "init.tokens"),
    ),
    Bug("a token is matched twice", _Constraint.take, drop("self.position += 1")),
    Bug(
        "a sampled token is not matched",
        ConstraintTable.start,
        replace("constraint.position < positions[row]", "constraint.position + 1 < positions[row]"),
    ),
    Bug("an answer ends inside the form", _Constraint._set_ends, without("matcher.is_accepting()")),
    Bug(
        "tokens that end the answer are allowed before the marker",
        _Constraint.allowed,
        replace("self._set_ends(bits, matcher)", "matcher and self._set_ends(bits, matcher)"),
    ),
    Bug(
        "the token that completes the marker is matched",
        _Constraint._skip_to_marker,
        replace("list(tokens[index + 1 :])", "list(tokens[index:])"),
    ),
    Bug(
        "a marker of two tokens is not found",
        _Constraint._skip_to_marker,
        replace("self._tail[-len(self._marker) :]", "b''"),
    ),
    Bug(
        "a lost worker is waited for",
        GrammarPreparation.worker_lost,
        replace("self._waiting.items()", "()", role="iter"),
    ),
    Bug(
        "a request does not wait for all workers",
        GrammarPreparation._call_done,
        replace("grammars - waiting", "grammars"),
    ),
    Bug(
        "a worker that joins is not sent the recent grammars",
        GrammarPreparation.worker_joined,
        replace("reversed(self._recent)", "()", role="iter"),
    ),
)
