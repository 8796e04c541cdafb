"""All changes of logits before the log-probabilities and the draw, in their one order.

Sums first, masks last, so that no later change lifts a mask: bias; penalties for tokens of the context; DRY; the
growing weight of the end; repeated n-grams and bad words; allowed ids; banned ids; the forced first token.

Every change is a function of a row's slot and position and of the tokens before that position in the token table. So
preemption, a worker loss and a resumed answer change no token, and several positions of a slot may be rows of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.sampling import Sampling
from lineclear.worker.attention.base import IntArray

from .penalties import BAD_WORDS, NGRAMS, PENALTIES
from .repetitions import DRY
from .sampling_rows import Change, Entries, Feature, SamplingRows, id_array

_MAX_DECAY = 1e30
"""Larger factors could make a logit infinite."""


def _bias(sampling: Sampling, vocab_size: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    ids, values = zip(*sampling.logit_bias, strict=True)
    return np.array(ids, np.int64), np.array(values, np.float32)


def _add_bias(rows: SamplingRows, biases: list[tuple[IntArray, npt.NDArray[np.float32]]]) -> Change:
    entries, values = rows.entries([ids for ids, _ in biases]), rows.put(np.concatenate([x for _, x in biases]))
    return lambda logits, _: logits.index_put_(entries, values, accumulate=True)


def _raise_ends(rows: SamplingRows, ends: list[IntArray]) -> Change | None:
    """Raise each end token's logit by its size times factor - 1 (transformers' exponential decay length penalty)."""
    grown = np.flatnonzero(rows.num_outputs > rows.scalars["exponential_decay_start"])
    if not len(grown):
        return None
    rows, ends = rows.take(grown), [ends[i] for i in grown]
    exponents = rows.num_outputs - rows.scalars["exponential_decay_start"]
    factors = np.minimum(rows.scalars["exponential_decay_factor"].astype(np.float64) ** exponents, _MAX_DECAY)
    by_entry = rows.put(np.repeat(factors, [len(x) for x in ends]).astype(np.float32))
    entries = rows.entries(ends)

    def change(logits: Tensor, _: Tensor) -> None:
        scores = logits[entries]
        sizes = scores.abs().masked_fill_(scores.isinf(), 0.0)  # ids that the model never produces stay at -inf
        logits[entries] = scores + sizes * (by_entry - 1)

    return change


def _keep_allowed(rows: SamplingRows, allowed: list[IntArray]) -> Change:
    indices, entries = rows.put(rows.indices), rows.entries(allowed)

    def change(logits: Tensor, _: Tensor) -> None:
        kept = logits[entries]
        logits[indices] = float("-inf")
        logits[entries] = kept

    return change


def _ban(most_outputs: Callable[[SamplingRows], Any], rows: SamplingRows, banned: list[IntArray]) -> Change | None:
    """Ban ids in rows with fewer output tokens than that."""
    places = np.flatnonzero(rows.num_outputs < most_outputs(rows))
    if not len(places):
        return None
    entries = rows.take(places).entries([banned[i] for i in places])
    return lambda logits, _: _fill(logits, entries, float("-inf"))


def _force_first(rows: SamplingRows, _: list[bool]) -> Change | None:
    first = np.flatnonzero(rows.num_outputs == 0)
    if not len(first):
        return None
    rows = rows.take(first)
    indices = rows.put(rows.indices)
    entries = indices, rows.put(rows.scalars["forced_first_id"].astype(np.int64))

    def change(logits: Tensor, _: Tensor) -> None:
        logits[indices] = float("-inf")
        _fill(logits, entries, 0.0)

    return change


def _fill(logits: Tensor, entries: Entries, value: float) -> None:
    logits.index_put_(entries, torch.full((), value, device=logits.device))


FEATURES = (
    Feature(["logit_bias"], _bias, _add_bias),
    PENALTIES,
    DRY,
    Feature(["exponential_decay_factor"], lambda sampling, _: id_array(sampling.stop_ids), _raise_ends),
    NGRAMS,
    BAD_WORDS,
    Feature(["allowed_ids"], lambda sampling, _: id_array(sampling.allowed_ids), _keep_allowed),
    Feature(["banned_ids"], lambda sampling, _: id_array(sampling.banned_ids), partial(_ban, lambda _: math.inf)),
    Feature(["begin_banned_ids"], lambda sampling, _: id_array(sampling.begin_banned_ids), partial(_ban, lambda _: 1)),
    Feature(
        ["min_tokens"],
        lambda sampling, _: id_array(sampling.stop_ids),
        partial(_ban, lambda rows: rows.scalars["min_tokens"]),
    ),
    Feature(["forced_first_id"], lambda *_: True, _force_first),
)
"""In the order in which they change logits."""
