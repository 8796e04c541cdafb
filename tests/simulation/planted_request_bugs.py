"""Bugs to plant around the core: grammars, several outputs, and beam searches. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, drop, replace, without

from lineclear.scheduler.engine.grammar_preparation import GrammarPreparation
from lineclear.scheduler.requests.answer.answer import Answer
from lineclear.scheduler.requests.answer.beams import Beams
from lineclear.worker.constraints import ConstraintTable, _Constraint

REQUEST_BUGS: Bugs = {
    GrammarPreparation.worker_joined: {
        "a worker that joins is not sent the recent grammars": replace("reversed(self._recent)", "()", role="iter")
    },
    GrammarPreparation.worker_lost: {
        "a lost worker is waited for": replace("self._waiting.items()", "()", role="iter")
    },
    GrammarPreparation._call_done: {
        "a request does not wait for all workers": replace("grammars - waiting", "grammars")
    },
    Answer.cancel: {"a search goes on after one of its requests failed": drop("stream.cancel(error)")},
    Beams._submit_step: {
        "a beam continues on another model": replace(
            "self._template.model_fingerprint or _1", "self._template.model_fingerprint"
        ),
        "each step of a search needs a place in the queue": replace("not is_first", "False"),
    },
    _Constraint.__init__: {
        "tokens of a slot's initialisation are not matched": replace("list(init.tokens[init.prompt_len :])", "[]"),
        "the prompt is matched, too": replace("init.tokens[init.prompt_len :]", "init.tokens"),
    },
    _Constraint.take: {"a token is matched twice": drop("self.position += 1")},
    _Constraint._skip_to_marker: {
        "the token that completes the marker is matched": replace("list(tokens[index + 1 :])", "list(tokens[index:])"),
        "a marker of two tokens is not found": replace("self._tail[-len(self._marker) :]", "b''"),
    },
    _Constraint.allowed: {
        "tokens that end the answer are allowed before the marker": replace(
            "self._set_ends(bits, matcher)", "matcher and self._set_ends(bits, matcher)"
        )
    },
    _Constraint._set_ends: {"an answer ends inside the form": without("matcher.is_accepting()")},
    ConstraintTable.set_slot: {"a slot keeps the constraint of its last sequence": drop("self.slots.pop(_, None)")},
    ConstraintTable.start: {
        "a sampled token is not matched": replace(
            "constraint.position < positions[row]", "constraint.position + 1 < positions[row]"
        )
    },
}
