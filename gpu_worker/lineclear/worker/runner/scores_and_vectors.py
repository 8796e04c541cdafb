"""Scores and vectors of a step: the outputs of rows that do not sample.

Logits are projected in pieces of `PIECE` positions, so a long prompt needs no memory for all of its logits at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, Scores, SlotInit
from lineclear.worker.attention.base import IntArray
from lineclear.worker.device.staging import to_device
from lineclear.worker.model.loaded_model import ModelForward
from lineclear.worker.sampling.sampler import cat_padded, top_logprobs

from .input_batch import OutputRow

PIECE = 64
"""Positions whose logits are projected at once: 39 MB in float32 with a vocabulary of 152k."""


class ScoreColumns(NamedTuple):
    logprobs: Tensor
    top_ids: Tensor
    """[num_positions, most of any row]."""
    top_logprobs: Tensor
    bad: Tensor
    """[num_positions] bool: the logits are not finite."""


class ReportedRows(NamedTuple):
    """Outputs of the rows that do not sample, on the device."""

    rows: tuple[OutputRow, ...]
    num_top: tuple[int, ...]
    """Of each scored row."""
    scores: ScoreColumns | None
    vectors: tuple[Tensor | None, ...]
    """Of each pooled row, float32; None before the row of the last token."""


class RowOutputs:
    """What the slots ask for, and the sums of the vectors that are not complete."""

    def __init__(self, flat_tokens: Tensor, device: torch.device) -> None:
        self._flat_tokens, self._device = flat_tokens, device
        self._num_top: dict[int, int] = {}
        self._pooling: dict[int, Pooling] = {}
        self._sums: dict[int, tuple[Tensor, int]] = {}

    def reset(self) -> None:
        for table in (self._num_top, self._pooling, self._sums):
            table.clear()

    def set_slots(self, inits: Iterable[SlotInit]) -> None:
        """Store what the new sequences ask for."""
        for init in inits:
            for table in (self._num_top, self._pooling, self._sums):
                table.pop(init.slot, None)
            if init.num_top_scores:
                self._num_top[init.slot] = init.num_top_scores
            if init.pooling is not None:
                self._pooling[init.slot] = init.pooling

    @torch.no_grad()  # in inference mode, the model's buffers could not be written by later steps
    def compute(self, rows: tuple[OutputRow, ...], forward: ModelForward) -> ReportedRows:
        """Return the outputs of the scored and pooled rows of a step that `forward` has computed."""
        scored = [row for row in rows if row.output == RowOutput.SCORE]
        pooled = [row for row in rows if row.output == RowOutput.POOL]
        num_top = tuple(self._num_top.get(row.slot, 0) for row in scored)
        scores = self._score(scored, num_top, forward) if scored else None
        return ReportedRows(rows, num_top, scores, tuple(self._pool(row, forward) for row in pooled))

    def _score(self, rows: Sequence[OutputRow], num_top: Sequence[int], forward: ModelForward) -> ScoreColumns:
        packed = np.concatenate([np.arange(row.first, row.first + row.num_tokens) for row in rows])
        behind = np.concatenate([np.arange(row.token_index + 1, row.token_index + 1 + row.num_tokens) for row in rows])
        targets = self._flat_tokens.index_select(0, to_device(behind, self._device))
        by_position = np.repeat(num_top, [row.num_tokens for row in rows]).tolist()
        pieces = []
        for start in range(0, len(packed), PIECE):
            piece = slice(start, start + PIECE)
            logits = forward.logits(packed[piece]).values.float()
            pieces.append(self._scored(logits, targets[piece], by_position[piece]))
        return ScoreColumns(
            torch.cat([x.logprobs for x in pieces]),
            cat_padded([x.top_ids for x in pieces]),
            cat_padded([x.top_logprobs for x in pieces]),
            torch.cat([x.bad for x in pieces]),
        )

    def _scored(self, logits: Tensor, targets: Tensor, num_top: Sequence[int]) -> ScoreColumns:
        """Return the scores of positions with these logits, the tokens behind them, and numbers of top tokens."""
        bad = ~torch.isfinite(logits.amax(dim=-1))
        return ScoreColumns(*top_logprobs(torch.log_softmax(logits, dim=-1), targets, max(num_top)), bad)

    def _pool(self, row: OutputRow, forward: ModelForward) -> Tensor | None:
        pooling = self._pooling[row.slot]
        if pooling.kind is PoolingKind.LAST:
            return _finished(forward.hidden(np.array([row.first + row.num_tokens - 1]))[0].float(), pooling)
        total, count = self._sums.pop(row.slot, (torch.zeros((), device=self._device), 0))
        for start in range(row.first, row.first + row.num_tokens, PIECE):
            piece: IntArray = np.arange(start, min(start + PIECE, row.first + row.num_tokens))
            total = self._sum(total, forward.hidden(piece).float())
        count += row.num_tokens
        if row.is_last:
            return _finished(total / count, pooling)
        self._sums[row.slot] = total, count
        return None

    def _sum(self, total: Tensor, states: Tensor) -> Tensor:
        """Return the sum [hidden size] of `total` and of states [num_rows, hidden size]."""
        return total + states.sum(dim=0)


class RowOutputsByRow(RowOutputs):
    """Scores computed row by row, and sums in the order of the positions, however the prompt is divided."""

    def _scored(self, logits: Tensor, targets: Tensor, num_top: Sequence[int]) -> ScoreColumns:
        rows = range(len(logits))
        parts = [super(RowOutputsByRow, self)._scored(logits[[i]], targets[[i]], num_top[i : i + 1]) for i in rows]
        logprobs, top_ids, top, bad = zip(*parts, strict=True)
        return ScoreColumns(torch.cat(logprobs), cat_padded(top_ids), cat_padded(top), torch.cat(bad))

    def _sum(self, total: Tensor, states: Tensor) -> Tensor:
        for state in states:
            total = total + state
        return total


def _finished(vector: Tensor, pooling: Pooling) -> Tensor:
    """Return the vector truncated, and then scaled to length 1 unless it is zero."""
    if pooling.dimensions:
        vector = vector[: pooling.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector.clone()


def to_result(reported: ReportedRows) -> tuple[tuple[Scores, ...], tuple[bytes, ...], frozenset[int]]:
    """Return the scores, the vectors and the indices in `reported.rows` of rows that are not finite, from the host."""
    scores, num_top, vectors = list[Scores](), iter(reported.num_top), iter(reported.vectors)
    bad, start, columns = set[int](), 0, reported.scores
    packed_vectors = list[bytes]()
    for index, row in enumerate(reported.rows):
        if row.output == RowOutput.POOL:
            vector = next(vectors)
            if vector is not None and not bool(torch.isfinite(vector).all()):
                bad.add(index)
            packed_vectors.append(b"" if vector is None else vector.numpy().astype("<f4").tobytes())
            continue
        assert columns is not None
        end, k = start + row.num_tokens, next(num_top)
        if bool(columns.bad[start:end].any()):
            bad.add(index)
        ids, values = columns.top_ids[start:end, :k], columns.top_logprobs[start:end, :k]
        flat_ids, flat_values = ids.reshape(-1).tolist(), values.reshape(-1).tolist()
        scores.append(Scores(tuple(columns.logprobs[start:end].tolist()), tuple(flat_ids), tuple(flat_values)))
        start = end
    return tuple(scores), tuple(packed_vectors), frozenset(bad)
