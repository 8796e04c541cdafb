"""Bugs of requests with grammars: in the core, in the worker's constraints, and in the preparation of grammars."""

from __future__ import annotations

from simulation.mutations import Bug, drop, never, off_by_one, replace, without

from lineclear.scheduler.core import result_applier
from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.result_applier import ResultApplier
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
        replace("failed", "(row for row in failed if row in result.bad_rows)", role="iter"),
    ),
    Bug("the token of a stuck row counts", result_applier._bad_rows, replace("outside - result.stuck_rows", "outside")),
    Bug(
        "a stuck row beyond the outputs is accepted",
        InflightStep.check,
        replace("(*result.bad_rows, *result.stuck_rows)", "result.bad_rows"),
    ),
    Bug("a slot keeps the constraint of its last sequence", ConstraintTable.set_slot, drop("self._slots.pop(_, None)")),
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
        off_by_one("positions[row]", -1),
    ),
    Bug("an answer ends inside the form", _Constraint.set_ends, without("matcher.may_end")),
    Bug(
        "tokens that end the answer are allowed before the marker",
        ConstraintTable._masks,
        drop("constraint.set_ends(bits[row], None)"),
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
    Bug("a lost worker is waited for", GrammarPreparation.check, never("lost", role="test")),
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
