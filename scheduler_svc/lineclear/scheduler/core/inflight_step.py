"""A plan that waits for its result, and the tokens of a result."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import chain, compress, count
from operator import contains
from typing import NamedTuple, TypeVar

from lineclear.scheduler.core.decode_batch import DecodeRows
from lineclear.scheduler.core.events import Event, StepTokens
from lineclear.scheduler.core.sequence import Sequence
from lineclear.wire.messages import Logprobs, RowOutput, StepResult

_T = TypeVar("_T")


class BadResult(ValueError):
    """A result that no correct worker returns for its plan. Nothing of it was applied."""


class ChunkRow(NamedTuple):
    """A chunk of a plan: positions [start, end) of a sequence, in the admission `admission_count`."""

    sequence: Sequence
    admission_count: int
    start: int
    end: int
    output: RowOutput
    num_drafts: int = 0
    """Drafts that it may verify, behind `end`."""

    @property
    def has_vector(self) -> bool:
        """Whether the result has the vector of the sequence for it."""
        return self.output is RowOutput.POOL and self.end == self.sequence.prompt_len


@dataclass(slots=True)
class InflightStep:
    """The sequences of a plan's rows: first those of the decode batch, then the chunks."""

    step: int
    decode_step: int = 0
    """Number of the decode step, if the plan has one."""
    decode_rows: DecodeRows = field(default_factory=DecodeRows)
    completing_block: list[Sequence] = field(default_factory=list)
    """Sequences of `decode_rows` whose row fills a block."""
    chunk_rows: list[ChunkRow] = field(default_factory=list)
    num_tokens: int = 0
    kv_tokens: int = 0
    num_scored: int = 0
    """Positions with a score."""
    has_drafts: bool = False
    """A row may verify drafts."""
    planned_at: float = 0.0
    is_ahead: bool = False
    """It was planned while another step was in flight."""

    @property
    def num_rows(self) -> int:
        """Number of decodes and chunks."""
        return len(self.decode_rows.sequences) + len(self.chunk_rows)

    def sequences(self) -> Iterator[Sequence]:
        return chain(self.decode_rows.sequences, (row.sequence for row in self.chunk_rows))

    def chunks_with(self, output: RowOutput) -> list[ChunkRow]:
        """Return the chunks with this output, in the order of the result."""
        return [row for row in self.chunk_rows if row.output is output]

    def outputs(self) -> list[ChunkRow]:
        """Return the chunks with an output. Their indices in a result follow those of the decodes."""
        return [row for row in self.chunk_rows if row.output is not RowOutput.NONE]

    def output_owners(self) -> Iterator[tuple[Sequence, int]]:
        """Return sequence and admission_count of every row with an output, in the order of the result.

        A preempted sequence waits for its samples, but not for its scores and vectors: it may be admitted again first.
        """
        decodes = ((sequence, sequence.admission_count) for sequence in self.decode_rows.sequences)
        return chain(decodes, ((row.sequence, row.admission_count) for row in self.outputs()))

    def sampled(self) -> Iterator[Sequence]:
        """Return the sequence of every sampling row, in the order of the result."""
        return chain(self.decode_rows.sequences, (row.sequence for row in self.chunks_with(RowOutput.SAMPLE)))

    def check(self, result: StepResult) -> None:
        """Raises BadResult for a result that does not fit this plan."""
        n = len(self.decode_rows.sequences)
        if self.chunk_rows or result.counts or result.num_drafted:
            n = self._check_counts(result)
        if len(result.tokens) != n or len(result.logprobs) not in (0, n):
            raise BadResult(f"{len(result.tokens)} tokens and {len(result.logprobs)} logprobs for {n} samples")
        if result.bad_rows or result.stuck_rows or result.deferred_rows:
            named = *result.bad_rows, *result.stuck_rows, *result.deferred_rows
            if not all(0 <= index < result.num_outputs for index in named):
                raise BadResult(f"a bad, stuck or deferred row beyond the {result.num_outputs} outputs")
        if not 0.0 <= result.step_seconds < float("inf"):  # also False for NaN
            raise BadResult(f"a step of {result.step_seconds} seconds")
        if not 0.0 <= result.draft_seconds <= result.step_seconds:
            raise BadResult(f"drafts of {result.draft_seconds} seconds in a step of {result.step_seconds}")
        if self.chunk_rows or result.scores or result.vectors:
            self._check_outputs(result)

    def _check_outputs(self, result: StepResult) -> None:
        """Raises BadResult for scores and vectors that do not fit this plan."""
        num_positions = [row.end - row.start for row in self.chunks_with(RowOutput.SCORE)]
        if [len(scores.logprobs) for scores in result.scores] != num_positions:
            raise BadResult(f"scores of other positions than the {sum(num_positions)} of the plan")
        if any({len(x.top_ids), len(x.top_logprobs)} != {x.num_top * len(x.logprobs)} for x in result.scores):
            raise BadResult("positions with different numbers of top scores")
        has_vector = [row.has_vector for row in self.chunks_with(RowOutput.POOL)]
        if [vector != b"" for vector in result.vectors] != has_vector:
            raise BadResult(f"vectors of other rows than the {sum(has_vector)} of the plan")

    def _check_counts(self, result: StepResult) -> int:
        """Return the number of tokens that the result must have. Raises BadResult for wrong counts."""
        num_decodes, chunks = len(self.decode_rows.sequences), self.chunks_with(RowOutput.SAMPLE)
        n = num_decodes + len(chunks)
        if not (result.counts or result.num_drafted):
            return n
        counts, drafted = result.counts or (1,) * n, result.num_drafted or (0,) * n
        allowed = [0] * num_decodes + [row.num_drafts for row in chunks]
        if not len(counts) == len(drafted) == n:
            raise BadResult(f"{len(counts)} counts of tokens and {len(drafted)} of drafts for {n} sampling rows")
        if not all(0 < count <= 1 + num <= 1 + most for count, num, most in zip(counts, drafted, allowed, strict=True)):
            raise BadResult("a sampling row without a token, or with more than its drafts and one")
        return sum(counts)

    def computed(self, result: StepResult) -> tuple[int, int]:
        """Return `num_tokens` and `kv_tokens` without the drafts that the worker did not find."""
        if not self.has_drafts:
            return self.num_tokens, self.kv_tokens
        num_tokens, kv_tokens = self.num_tokens, self.kv_tokens
        chunks = self.chunks_with(RowOutput.SAMPLE)
        drafted = result.num_drafted[len(self.decode_rows.sequences) :] or (0,) * len(chunks)
        for row, num in zip(chunks, drafted, strict=True):
            num_tokens -= row.num_drafts - num
            kv_tokens -= kv_of_drafts(row.end, row.num_drafts) - kv_of_drafts(row.end, num)
        return num_tokens, kv_tokens


def kv_of_drafts(first: int, count: int) -> int:
    """Return how many positions `count` drafts attend to, the first of them at position `first`."""
    return count * (2 * first + count + 1) // 2


class ResultTokens:
    """Collects the confirmed tokens of one result as the columns of a StepTokens event."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._request_ids: list[str] = []
        self._indices: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs | None] = []  # empty if no row asks for logprobs

    def add(self, sequence: Sequence, sample: int) -> None:
        token = self._result.tokens[sample]
        sequence.tokens.append(token)
        self._request_ids.append(sequence.request.request_id)
        self._indices.append(sequence.num_outputs - 1)
        self._tokens.append(token)
        self._logprobs += self._result.logprobs[sample : sample + 1]

    def add_decode_rows(self, inflight: InflightStep, skipped: SequenceOf[int]) -> list[Sequence]:
        """Append the tokens of the decode rows, without the `skipped` rows, which are in ascending order.

        Returns the sequences whose token is a stop token. Call it before `add`. It calls no Python function per row, so
        a row costs a few dozen nanoseconds.
        """
        rows, decode_step = inflight.decode_rows, inflight.decode_step
        self._request_ids = _without(rows.request_ids, skipped)
        self._indices = [offset + decode_step for offset in _kept(rows.index_offsets, skipped)]
        self._tokens = _without(self._result.tokens[: len(rows.sequences)], skipped)
        logprobs = self._result.logprobs[: len(rows.sequences)]
        self._logprobs = _without(logprobs, skipped if logprobs else ())
        for tokens, token in zip(_kept(rows.token_lists, skipped), self._tokens, strict=True):
            tokens.append(token)
        stopped = [*compress(count(), map(contains, _kept(rows.stop_token_ids, skipped), self._tokens))]
        return [_kept(rows.sequences, skipped)[row] for row in stopped]

    def event(self) -> list[Event]:
        """Return the StepTokens event, or nothing without tokens."""
        if not self._tokens:
            return []
        return [StepTokens(self._request_ids, self._indices, self._tokens, self._logprobs)]


def _kept(column: tuple[_T, ...], skipped: SequenceOf[int]) -> SequenceOf[_T]:
    """Return the column without `skipped` entries, to read it: without a copy where none is skipped."""
    return _without(column, skipped) if skipped else column


def _without(column: tuple[_T, ...], skipped: SequenceOf[int]) -> list[_T]:
    kept = list(column)
    for row in reversed(skipped):
        del kept[row]
    return kept
