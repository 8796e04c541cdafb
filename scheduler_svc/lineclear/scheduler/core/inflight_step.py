"""A plan without its result yet, and what the result says of each sample. What follows from it is not decided here."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain, compress, count
from operator import contains
from typing import TypeVar

from lineclear.scheduler.core.decode_batch import DecodeRows
from lineclear.scheduler.core.events import Event, StepTokens
from lineclear.scheduler.core.sequence import Sequence
from lineclear.wire.messages import Logprobs, StepResult

_T = TypeVar("_T")


class BadResult(ValueError):
    """A result that no correct worker gives for the plan it belongs to. Nothing of it was applied."""


@dataclass(slots=True)
class InflightStep:
    """Whose rows a plan has: those of a beat, and the chunks."""

    step: int
    decode_offset: int
    """Of its decodes, if it has any."""
    decode_rows: DecodeRows
    completing_block: list[Sequence]
    """Those of the crew whose row fills a block."""
    owners: list[tuple[Sequence, int, int]]
    """Of each chunk: sequence, its residence, end position."""
    samples: list[Sequence]
    """Of the chunks."""
    num_tokens: int
    kv_tokens: int

    @property
    def num_rows(self) -> int:
        """Decodes and chunks."""
        return len(self.decode_rows.sequences) + len(self.owners)

    @property
    def num_samples(self) -> int:
        """Tokens its result must have."""
        return len(self.decode_rows.sequences) + len(self.samples)

    def sequences(self) -> Iterator[Sequence]:
        """Of every row."""
        return chain(self.decode_rows.sequences, (sequence for sequence, _, _ in self.owners))

    def sampled(self) -> Iterator[Sequence]:
        """Of every sample, in the result's order."""
        return chain(self.decode_rows.sequences, self.samples)

    def check(self, result: StepResult) -> None:
        """Raises BadResult for a result that cannot be this plan's."""
        n = self.num_samples
        if len(result.tokens) != n or len(result.logprobs) not in (0, n):
            raise BadResult(f"{len(result.tokens)} tokens for {n} samples")
        if not all(0 <= index < n for index in result.bad_rows):
            raise BadResult(f"a bad row beyond the {n} samples")
        if not 0.0 <= result.step_seconds < float("inf"):  # NaN fails this too
            raise BadResult(f"a step of {result.step_seconds} seconds")


class ResultTokens:
    """The confirmed tokens of one result, put together for their event."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._request_ids: list[str] = []
        self._indices: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs | None] = []  # stays empty when nobody asked

    def add(self, sequence: Sequence, sample: int) -> None:
        """Append the result's token `sample` to its sequence."""
        token = self._result.tokens[sample]
        sequence.tokens.append(token)
        self._request_ids.append(sequence.request.request_id)
        self._indices.append(sequence.num_outputs - 1)
        self._tokens.append(token)
        self._logprobs += self._result.logprobs[sample : sample + 1]

    def add_decode_rows(self, flight: InflightStep, without: SequenceOf[int]) -> list[Sequence]:
        """Append the tokens of a beat, but for the rows `without`, in ascending order. Returns whom a token may end.

        Costs a few dozen nanoseconds a row: nothing is called or looked up for each of them. To be called first.
        """
        crew, beat = flight.decode_rows, flight.decode_offset
        self._request_ids = _without_rows(crew.request_ids, without)
        self._indices = [first + beat for first in _without_rows(crew.firsts, without)]
        self._tokens = _without_rows(self._result.tokens[: len(crew.sequences)], without)
        self._logprobs = _without_rows(
            self._result.logprobs[: len(crew.sequences)], without if self._result.logprobs else ()
        )
        for output, token in zip(_without_rows(crew.outputs, without), self._tokens, strict=True):
            output.append(token)
        hits = [*compress(count(), map(contains, _without_rows(crew.stops, without), self._tokens))]
        return [_without_rows(crew.sequences, without)[row] for row in hits]

    def event(self) -> list[Event]:
        """What is told of them, if there are any."""
        if not self._tokens:
            return []
        return [StepTokens(self._request_ids, self._indices, self._tokens, self._logprobs)]


def _without_rows(column: tuple[_T, ...], without: SequenceOf[int]) -> list[_T]:
    kept = list(column)
    for row in reversed(without):
        del kept[row]
    return kept
