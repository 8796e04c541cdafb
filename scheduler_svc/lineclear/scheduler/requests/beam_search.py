"""Beam search as a state machine: the most likely tokens of each beam in, the next beams or the result out. No I/O.

The rules are those of `GenerationMixin._beam_search` in transformers 5.23 for one prompt without sampling: how many
candidates count, when a beam is finished, how length changes its score, and when the search stops. Scores have single
precision, as there.

Only the best `num_beams` candidates can end, and only the best `num_beams` that do not end continue. Both are found by
merging the sorted tokens of the beams, so a step reads a few continuations of each beam.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

from lineclear.wire.messages import Logprobs


class EarlyStopping(Enum):
    """When a search with `num_beams` finished beams stops."""

    HEURISTIC = 1
    """When no running beam has a better score at its present length (transformers: False)."""
    WHEN_FULL = 2
    """At once (transformers: True)."""
    NEVER = 3
    """When no running beam can have a better score at any length (transformers: "never")."""


class BeamSettings(NamedTuple):
    """Parameters of a search. A beam ends with one of `end_ids`, which it cannot before `min_tokens`."""

    num_beams: int
    max_tokens: int
    end_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    min_tokens: int = 0
    vocab_size: int = 1 << 31

    @property
    def num_top(self) -> int:
        """Number of most likely tokens that each beam needs: `num_beams` of them do not end it."""
        return self.num_beams + len(self.end_ids)


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens and the sum of their log-probabilities; of a finished beam, the sum divided by length ** penalty."""

    tokens: tuple[int, ...]
    score: float
    parent: Beam | None = None
    last_logprobs: Logprobs | None = None
    """Of the last token; those of the others are its parents'."""

    @property
    def logprobs(self) -> list[Logprobs]:
        """Log probabilities of the tokens, if the search keeps them."""
        found, beam = list[Logprobs](), self
        while beam.last_logprobs is not None and beam.parent is not None:
            found.append(beam.last_logprobs)
            beam = beam.parent
        return found[::-1]


class _Candidate(NamedTuple):
    """A continuation of the running beam number `beam` by one token."""

    score: float
    beam: int
    token: int
    logprob: float


class BeamSearch:
    """One search. It starts with one empty beam. `num_shown`: log probabilities to keep of each token, -1 for none."""

    def __init__(self, settings: BeamSettings, num_shown: int = -1) -> None:
        self.running = [Beam((), 0.0)]
        """The beams to continue, best first."""
        self.finished: list[Beam] = []
        """The best finished beams, best first, at most `num_beams`."""
        self.is_done = False
        self._settings = settings
        self._num_shown = num_shown

    def advance(self, steps: Sequence[Logprobs]) -> None:
        """Continue the running beams by one token. `steps[i].top` are the most likely tokens after `running[i]`."""
        settings = self._settings
        end_ids, length = settings.end_ids, len(self.running[0].tokens) + 1
        is_last = length >= settings.max_tokens
        best = self._best(steps, excluded=end_ids if length <= settings.min_tokens else frozenset())
        divisor = _power(length, settings.length_penalty)
        ended = [
            self._beam(found, steps, _quotient(found.score, divisor))
            for found in best
            if is_last or found.token in end_ids
        ]
        if ended:
            ranked = sorted([*self.finished, *ended], key=attrgetter("score"), reverse=True)
            self.finished = ranked[: settings.num_beams]
        if is_last:
            self.running = []
        else:
            self.running = [self._beam(found, steps, found.score) for found in self._best(steps, excluded=end_ids)]
        self.is_done = not self.running or self._is_over(length)

    def _best(self, steps: Sequence[Logprobs], excluded: frozenset[int]) -> list[_Candidate]:
        """Return the best `num_beams` continuations, best first, of equal ones those of the better beam."""
        rows = [
            _continuations(index, beam.score, step, excluded)
            for index, (beam, step) in enumerate(zip(self.running, steps, strict=True))
        ]
        merged = heapq.merge(*rows, key=itemgetter(0), reverse=True)
        return list(islice(merged, self._settings.num_beams))

    def _beam(self, found: _Candidate, steps: Sequence[Logprobs], score: float) -> Beam:
        parent, shown = self.running[found.beam], None
        if self._num_shown >= 0:
            shown = Logprobs(found.logprob, steps[found.beam].top[: self._num_shown])
        return Beam((*parent.tokens, found.token), score, None if shown is None else parent, shown)

    def _is_over(self, length: int) -> bool:
        """Return whether no running beam may replace a finished one."""
        settings = self._settings
        if len(self.finished) < settings.num_beams:
            return False
        if settings.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        if settings.early_stopping is EarlyStopping.NEVER and settings.length_penalty > 0:
            length = settings.max_tokens
        best = _quotient(self.running[0].score, _power(length, settings.length_penalty))
        return best <= self.finished[-1].score


def _continuations(index: int, score: float, step: Logprobs, excluded: frozenset[int]) -> Iterator[_Candidate]:
    """Yield the continuations of a beam, best first. Few are read, so each is made when it is read."""
    for token, logprob in step.top:
        if token not in excluded:
            yield _Candidate(_single(score + logprob), index, token, logprob)


def _power(length: int, penalty: float) -> float:
    return _single(float(length) ** penalty)


def _quotient(score: float, divisor: float) -> float:
    """Divide in single precision, by 0 too: a high power of a large length is 0 or infinite there."""
    return _single(score / divisor) if divisor else -math.inf


def _single(value: float) -> float:
    return array("f", [value])[0]
