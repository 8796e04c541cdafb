"""Samples one token per row: a pure function of (logits, parameters, noise), for all sampling rows of a step at once.

Order and meaning are those of transformers' logits processors: the changes of logit_changes.py; the reported
log-probabilities; temperature and the truncations of truncation.py; the draw.

A draw is inverse transform sampling over token ids in ascending order, with one noise number per row (unlike
Gumbel-max, which needs one per token).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineclear.worker.device.staging import to_device
from lineclear.worker.structured_output.grammar_constraints import Masks
from lineclear.worker.structured_output.mask_threads import Bits

from .logits import Logits, bad_rows, with_argmax
from .sampling_metadata import SamplingMetadata
from .truncation import truncated_weights, wide_dtype

_CHUNK_WIDTH = 512


class Sampled(NamedTuple):
    """Outputs of a step's sampling rows, on the device."""

    tokens: Tensor
    """[num_rows] int64; 0 in bad rows."""
    bad: Tensor | None
    """[num_rows] bool: the model's logits are not finite. None: no row is bad."""
    logprobs: Tensor | None = None
    """[num_logprob_rows]: of the sampled token, in the order of `SamplingMetadata.logprobs`."""
    top_ids: Tensor | None = None
    """[num_logprob_rows, max num_top]: most likely first, the lowest id first among equals."""
    top_logprobs: Tensor | None = None
    id_logprobs: Tensor | None = None
    """Of the tokens in `LogprobRows.ids`, one row after the other. None: of no tokens."""
    host_tokens: list[int] | None = None
    """`tokens` as a list, on a CPU for greedy steps."""
    stuck: Tensor | None = None
    """[num_rows] bool: the logits are finite, but no token is allowed. None: no row is stuck."""
    deferred: Sequence[int] = ()
    """Rows whose mask was not ready; their tokens mean nothing."""
    void: Sequence[int] = ()
    """Those of them whose input is not known; their values mean nothing either."""


def sample(logits: Logits, metadata: SamplingMetadata, token_table: Tensor, masks: Masks | None = None) -> Sampled:
    """Return one token per row. May overwrite `logits` and return tensors in its memory.

    `token_table` [num_slots, positions] holds the tokens of every sequence, for penalties. `masks` are the allowed
    tokens of rows with structured output.
    """
    masked = logits if masks is None else apply_masks(logits, masks)
    # A mask may hide a value that is not finite.
    if masked.host_max is not None and metadata.is_greedy and _is_finite(logits) and _is_finite(masked):
        return Sampled(masked.max_ids, None, host_tokens=masked.host_max[1])
    return _sample(logits, masked, metadata, token_table)


def _is_finite(logits: Logits) -> bool:
    """Return whether the maximum of each row is known to be finite."""
    return logits.host_max is not None and all(map(math.isfinite, logits.host_max[0]))


@torch.inference_mode()
def _sample(model_logits: Logits, masked: Logits, metadata: SamplingMetadata, token_table: Tensor) -> Sampled:
    bad = bad_rows(model_logits)
    failed = bad if masked is model_logits else bad | bad_rows(masked)
    logits, tokens = masked.values, masked.max_ids
    if metadata.is_greedy:
        tokens = tokens if failed is model_logits.bad else tokens.masked_fill(failed, 0)
        return Sampled(tokens, bad, stuck=_stuck(failed, bad))
    if metadata.rows:
        return _sample_rows(model_logits, masked, metadata.rows, token_table)
    logits = logits.float()
    if metadata.changes:
        for change in metadata.changes:
            change(logits, token_table)
        changed = with_argmax(logits)
        logits, tokens, failed = changed.values, changed.max_ids, failed | bad_rows(changed)
    for draws in metadata.draws:
        if "top_k" in draws.parameters:
            weights = truncated_weights(logits, draws)
        else:
            weights = torch.softmax(logits[draws.rows].div_(draws.parameters["temperature"]), dim=-1)
        tokens[draws.rows] = _inverse_cdf(weights, draws.noise)
    tokens.masked_fill_(failed, 0)
    stuck = _stuck(failed, bad)
    if metadata.logprobs is None:
        return Sampled(tokens, bad, stuck=stuck)
    rows, ids = metadata.logprobs.rows, metadata.logprobs.ids
    all_logprobs = torch.log_softmax(logits[rows], dim=-1)
    top = top_logprobs(all_logprobs, tokens[rows], max(metadata.logprobs.num_top))
    return Sampled(tokens, bad, *top, None if ids is None else all_logprobs[ids], stuck=stuck)


@torch.inference_mode()
def apply_masks(logits: Logits, masks: Masks) -> Logits:
    """Set the logits of tokens that structured output does not allow to -inf, in place. Other rows are not touched."""
    if not masks.rows:
        return logits
    values = logits.values
    rows = to_device(np.array(masks.rows, np.int64), values.device)
    banned = _banned(masks.bits, values.shape[1], values.device)
    if len(masks.rows) == len(values):
        values.masked_fill_(banned, float("-inf"))
        return with_argmax(values)
    constrained = with_argmax(values.index_select(0, rows).masked_fill_(banned, float("-inf")))
    values.index_copy_(0, rows, constrained.values)
    max_values = logits.max_values.index_copy(0, rows, constrained.max_values)
    max_ids = logits.max_ids.index_copy(0, rows, constrained.max_ids)
    host_max = (max_values.tolist(), max_ids.tolist()) if logits.host_max is not None else None
    bad = None
    if logits.bad is not None and constrained.bad is not None:
        bad = logits.bad.index_copy(0, rows, constrained.bad)
    return Logits(values, max_values, max_ids, host_max, bad)


def _banned(bits: Bits, vocabulary: int, device: torch.device) -> Tensor:
    """Return [num_rows, vocabulary] bool."""
    if device.type == "cpu":
        columns = np.unpackbits((~bits).astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(columns[:, :vocabulary].view(np.bool_))
    words = to_device(bits.view(np.int32), device)
    shifts = torch.arange(32, device=device, dtype=torch.int32)
    return ((words[:, :, None] >> shifts & 1) == 0).flatten(1)[:, :vocabulary]


def _sample_rows(
    model_logits: Logits, masked: Logits, rows: Sequence[SamplingMetadata], token_table: Tensor
) -> Sampled:
    sampled = []
    for index, metadata in enumerate(rows):
        row = _row(model_logits, index)
        sampled.append(_sample(row, row if masked is model_logits else _row(masked, index), metadata, token_table))

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return None if not found else torch.cat(found) if found[0].dim() == 1 else cat_padded(found)

    tokens, *others = zip(*(x[:6] for x in sampled), strict=True)
    stuck = [torch.zeros_like(x.tokens, dtype=torch.bool) if x.stuck is None else x.stuck for x in sampled]
    bad, logprobs, top_ids, top, ids = map(joined, others)
    return Sampled(torch.cat(tokens), bad, logprobs, top_ids, top, ids, stuck=torch.cat(stuck))


def _row(logits: Logits, index: int) -> Logits:
    """Return a copy of one row, which is aligned as that of any other row."""
    values, max_values, ids = (column[index : index + 1].clone() for column in logits[:3])
    return Logits(values, max_values, ids, bad=None if logits.bad is None else logits.bad[index : index + 1])


def cat_padded(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows [num_rows, width] of several widths, with zeros behind the short ones."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def _stuck(failed: Tensor, bad: Tensor) -> Tensor | None:
    return None if failed is bad else failed & ~bad


def _inverse_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """Return per row the index where the running sum of the weights exceeds noise * sum; never one of weight 0.

    Two levels, sums of chunks and then one chunk: a running sum in float64 over a whole vocabulary costs more than the
    softmax. The order of summation does not depend on other rows.
    """
    if padding := -weights.shape[-1] % _CHUNK_WIDTH:
        weights = torch.nn.functional.pad(weights, (0, padding))
    chunks = weights.view(len(weights), -1, _CHUNK_WIDTH)
    sums = chunks.sum(dim=-1).to(wide_dtype(weights))
    running = sums.cumsum(dim=-1)
    target = noise * running[:, -1:]
    chunk = _first_above(running, target)
    in_chunk = chunks[torch.arange(len(weights), device=weights.device), chunk[:, 0]]
    target = target - (running - sums).gather(1, chunk)
    index = _first_above(in_chunk.cumsum(dim=-1, dtype=wide_dtype(weights)), target)
    return (chunk * _CHUNK_WIDTH + index)[:, 0]


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """Return [rows, 1]: the first index whose running sum exceeds the target, at most the last one with a weight."""
    last = (running < running[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((running <= target).sum(dim=-1, keepdim=True), last)


def top_logprobs(all_logprobs: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the tokens, then top ids and their values."""
    chosen = all_logprobs.gather(1, tokens[:, None])[:, 0]
    values, ids = all_logprobs.topk(min(num_top, all_logprobs.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return chosen, ids.gather(1, order), values
