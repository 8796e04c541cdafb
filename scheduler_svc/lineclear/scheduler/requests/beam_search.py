"""Beam search as a state machine: the most likely tokens of each beam in, the next beams or the result out. No I/O.

The rules are those of `GenerationMixin._beam_search` in transformers 5.23 for one prompt without sampling: how many
candidates count, when a beam is finished, how length changes its score, and when the search stops. Scores have single
precision, as there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
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

    @property
    def num_candidates(self) -> int:
        """Number of continuations of all beams that count in a step: enough for `num_beams` that do not end."""
        return max(2, 1 + len(self.end_ids)) * self.num_beams

    @property
    def num_top(self) -> int:
        """Number of most likely tokens that each beam needs."""
        return self.num_candidates + (len(self.end_ids) if self.min_tokens else 0)


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens and the sum of their log-probabilities; of a finished beam, the sum divided by length ** penalty."""

    tokens: tuple[int, ...]
    score: float
    logprobs: tuple[Logprobs, ...] = ()


class BeamSearch:
    """One search. It starts with one empty beam."""

    def __init__(self, settings: BeamSettings) -> None:
        self.running = [Beam((), 0.0)]
        """The beams to continue, best first."""
        self.finished: list[Beam] = []
        """The best finished beams, best first, at most `num_beams`."""
        self.is_done = False
        self._settings = settings

    def advance(self, steps: Sequence[Logprobs]) -> None:
        """Continue the running beams by one token. `steps[i].top` are the most likely tokens after `running[i]`."""
        settings = self._settings
        candidates = self._candidates(steps)
        length = len(self.running[0].tokens) + 1
        is_last = length >= settings.max_tokens
        ends = [is_last or beam.tokens[-1] in settings.end_ids for beam in candidates]
        divisor = _single(float(length) ** settings.length_penalty)
        for beam, is_end in zip(candidates[: settings.num_beams], ends, strict=False):
            if is_end:
                self.finished.append(Beam(beam.tokens, _single(beam.score / divisor), beam.logprobs))
        self.finished = sorted(self.finished, key=attrgetter("score"), reverse=True)[: settings.num_beams]
        self.running = [beam for beam, is_end in zip(candidates, ends, strict=True) if not is_end][: settings.num_beams]
        self.is_done = not self.running or self._is_over(length)

    def _candidates(self, steps: Sequence[Logprobs]) -> list[Beam]:
        """Return the best continuations of all beams, best first."""
        settings = self._settings
        barred = settings.end_ids if len(self.running[0].tokens) < settings.min_tokens else frozenset()
        found = [
            (_single(beam.score + logprob), beam, token, logprob, step)
            for beam, step in zip(self.running, steps, strict=True)
            for token, logprob in step.top
            if token not in barred
        ]
        found.sort(key=lambda entry: entry[0], reverse=True)
        return [
            Beam((*beam.tokens, token), score, (*beam.logprobs, Logprobs(logprob, step.top)))
            for score, beam, token, logprob, step in found[: settings.num_candidates]
        ]

    def _is_over(self, length: int) -> bool:
        """Return whether no running beam may replace a finished one."""
        settings = self._settings
        if len(self.finished) < settings.num_beams:
            return False
        if settings.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        if settings.early_stopping is EarlyStopping.NEVER and settings.length_penalty > 0:
            length = settings.max_tokens
        best = _single(self.running[0].score / _single(float(length) ** settings.length_penalty))
        return best <= self.finished[-1].score


def _single(value: float) -> float:
    """Round to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
