"""Bugs to plant around the core: grammars, several outputs, and beam searches. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, drop, replace, without

from lineclear.scheduler.engine.grammar_preparation import GrammarPreparation
from lineclear.scheduler.requests.answer.answer import Answer
from lineclear.scheduler.requests.answer.beams import Beams
from lineclear.worker.structured_output import grammar_constraints

REQUEST_BUGS: Bugs = {
    GrammarPreparation: {
        "a worker that joins is not sent the recent grammars": replace("reversed(self._recent)", "()", role="iter"),
        "a request does not wait for all workers": replace("grammars - waiting", "grammars"),
    },
    GrammarPreparation.worker_lost: {
        "a lost worker is waited for": replace("self._waiting.items()", "()", role="iter")
    },
    Answer: {"a search goes on after one of its requests failed": drop("stream.cancel(error)")},
    Beams: {
        "a beam continues on another model": replace(
            "self._template.model_fingerprint or _1", "self._template.model_fingerprint"
        ),
        "each step of a search needs a place in the queue": replace("not is_first", "False"),
    },
    grammar_constraints: {
        "tokens of a slot's initialisation are not matched": replace("list(init.tokens[init.prompt_len :])", "[]"),
        "the prompt is matched, too": replace("init.tokens[init.prompt_len :]", "init.tokens"),
        "a token is matched twice": drop("self.position += 1"),
        "the token that completes the marker is matched": replace("list(tokens[index + 1 :])", "list(tokens[index:])"),
        "a marker of two tokens is not found": replace("self._tail[-len(self._marker) :]", "b''"),
        "tokens that end the answer are allowed before the marker": replace(
            "self._set_ends(bits, matcher)", "matcher and self._set_ends(bits, matcher)"
        ),
        "an answer ends inside the form": without("matcher.is_accepting()"),
        "a slot keeps the constraint of its last sequence": drop("self.slots.pop(_, None)"),
        "a sampled token is not matched": replace(
            "constraint.position < positions[row]", "constraint.position + 1 < positions[row]"
        ),
    },
}
