"""Sampling parameters of every slot as columns, and the part of them that one step needs (vLLM's `SamplingMetadata`).

The table lives on the host. When a plan arrives, it is known which rows are greedy, penalized or restricted, so the
device receives only what it needs; a step of greedy rows receives nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import or_

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.sampling import SCALARS, Sampling, Use

from .attention.base import IntArray, to_device
from .uniform_noise import uniform

_DTYPE = np.dtype([(name, scalar.format) for name, scalar in SCALARS.items()])
_NEUTRAL = {use: {name: getattr(Sampling(), name) for name, x in SCALARS.items() if x.use is use} for use in Use}
_NO_IDS = np.zeros(0, np.int64)

_Scalars = npt.NDArray[np.void]
"""[num_rows] of `_DTYPE`."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Single logits: `ids[i]` of sampling row `rows[i]`."""

    rows: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Rows with penalties for tokens of their own context. Columns are [num_rows, 1]."""

    rows: Tensor
    parameters: Mapping[str, Tensor]
    """Columns of the PENALTY scalars."""
    slots: Tensor
    lengths: Tensor
    """Number of tokens so far."""
    prompt_lens: Tensor
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Rows that are drawn from a distribution. Columns are [num_rows, 1]."""

    rows: Tensor
    parameters: Mapping[str, Tensor]
    """Columns of the DRAW scalars; for truncated draws of the TRUNCATION scalars as well."""
    noise: Tensor
    """Uniform in [0, 1); float64 where the device supports it."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """Sampling work of a step, on the device. None marks parts without work."""

    num_rows: int
    bias: Entries | None = None
    bias_values: Tensor | None = None
    penalties: Penalties | None = None
    allowed: Entries | None = None
    allowed_rows: Tensor | None = None
    """The distinct rows of `allowed`."""
    banned: Entries | None = None
    draws: Draws | None = None
    truncated_draws: Draws | None = None
    logprob_rows: Tensor | None = None
    """Rows that report log-probabilities."""
    host_logprob_rows: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
    """For each row of `logprob_rows`: how many of the most likely tokens to report."""

    @property
    def is_greedy(self) -> bool:
        """Every row only needs the argmax of the model's own logits."""
        is_drawn = self.draws is not None or self.truncated_draws is not None
        return not is_drawn and self.logprob_rows is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Some rows have a bias, penalties, or allowed or banned ids."""
        return not (self.bias is None and self.penalties is None and self.allowed is None and self.banned is None)


@dataclass(frozen=True, slots=True, eq=False)
class _Lists:
    """List parameters of a slot."""

    bias_ids: IntArray
    bias_values: npt.NDArray[np.float32]
    allowed: IntArray
    banned: IntArray
    stop: IntArray


class SamplingTable:
    """Sampling parameters of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._scalars = np.zeros(num_slots, _DTYPE)
        self._lists: list[_Lists | None] = [None] * num_slots
        self._not_greedy = set[int]()
        """Slots that need more than the argmax of the model's own logits."""

    def set_slot(self, slot: int, sampling: Sampling) -> None:
        """Store the parameters of the slot's new sequence."""
        if sampling.top_k >= self._vocab_size:
            sampling = replace(sampling, top_k=0)
        self._scalars[slot] = tuple(getattr(sampling, name) for name in SCALARS)
        lists = _Lists(
            np.array([i for i, _ in sampling.logit_bias], np.int64),
            np.array([value for _, value in sampling.logit_bias], np.float32),
            np.array(sorted(set(sampling.allowed_ids)), np.int64),
            np.array(sorted(set(sampling.banned_ids)), np.int64),
            np.array(sorted(set(sampling.stop_ids)) if sampling.min_tokens else [], np.int64),
        )
        has_lists = any(len(getattr(lists, name)) for name in ("bias_ids", "allowed", "banned", "stop"))
        self._lists[slot] = lists if has_lists else None
        is_penalized = any(getattr(sampling, name) != neutral for name, neutral in _NEUTRAL[Use.PENALTY].items())
        if has_lists or is_penalized or sampling.temperature > 0 or sampling.logprobs >= 0:
            self._not_greedy.add(slot)
        else:
            self._not_greedy.discard(slot)

    def select(self, slots: list[int], positions: list[int], prompt_lens: IntArray) -> SamplingMetadata:
        """Return the sampling work of a step whose rows have these slots and sample tokens at these positions.

        `prompt_lens` [num_slots].
        """
        if self._not_greedy.isdisjoint(slots):
            return _greedy(len(slots))
        return self._select(np.array(slots, np.int64), np.array(positions, np.int64), prompt_lens)

    def _select(self, slots: IntArray, positions: IntArray, prompt_lens: IntArray) -> SamplingMetadata:
        scalars, prompt_lens = self._scalars[slots], prompt_lens[slots]
        is_drawn, is_truncated = scalars["temperature"] > 0, _differs(scalars, Use.TRUNCATION)
        lists = [self._lists[slot] for slot in slots]
        bias, allowed = self._entries(lists, "bias_ids"), self._entries(lists, "allowed")
        logprob_rows = np.flatnonzero(scalars["logprobs"] >= 0)
        return SamplingMetadata(
            num_rows=len(slots),
            bias=bias,
            bias_values=None if bias is None else self._put(np.concatenate([x.bias_values for x in lists if x])),
            penalties=self._penalties(scalars, slots, positions, prompt_lens),
            allowed=allowed,
            allowed_rows=None if allowed is None else self._rows_with(lists, "allowed"),
            banned=self._banned(lists, positions - prompt_lens < scalars["min_tokens"]),
            draws=self._draws(scalars, positions, is_drawn & ~is_truncated, Use.DRAW),
            truncated_draws=self._draws(scalars, positions, is_drawn & is_truncated, Use.DRAW, Use.TRUNCATION),
            logprob_rows=self._put(logprob_rows) if len(logprob_rows) else None,
            host_logprob_rows=tuple(logprob_rows.tolist()),
            num_top=tuple(scalars["logprobs"][logprob_rows].tolist()),
        )

    def _penalties(
        self, scalars: _Scalars, slots: IntArray, lengths: IntArray, prompt_lens: IntArray
    ) -> Penalties | None:
        rows = np.flatnonzero(_differs(scalars, Use.PENALTY))
        if not len(rows):
            return None
        return Penalties(
            rows=self._put(rows),
            parameters=self._columns(scalars, rows, Use.PENALTY),
            slots=self._put(slots[rows]),
            lengths=self._column(lengths[rows]),
            prompt_lens=self._column(prompt_lens[rows]),
            max_length=int(lengths[rows].max()),
        )

    def _draws(
        self, scalars: _Scalars, positions: IntArray, is_member: npt.NDArray[np.bool_], *uses: Use
    ) -> Draws | None:
        rows = np.flatnonzero(is_member)
        if not len(rows):
            return None
        noise = uniform(scalars["seed"][rows], positions[rows])
        return Draws(
            rows=self._put(rows),
            parameters=self._columns(scalars, rows, *uses),
            noise=self._column(noise if self._device.type != "mps" else noise.astype(np.float32)),
        )

    def _banned(self, lists: Sequence[_Lists | None], is_too_short: npt.NDArray[np.bool_]) -> Entries | None:
        banned = self._entries(lists, "banned")
        stops = self._entries([x if short else None for x, short in zip(lists, is_too_short, strict=True)], "stop")
        if banned is None or stops is None:
            return banned or stops
        return Entries(torch.cat([banned.rows, stops.rows]), torch.cat([banned.ids, stops.ids]))

    def _entries(self, lists: Sequence[_Lists | None], name: str) -> Entries | None:
        ids = [getattr(x, name) if x is not None else _NO_IDS for x in lists]
        flat = np.concatenate(ids) if ids else _NO_IDS
        if not len(flat):
            return None
        rows = np.repeat(np.arange(len(ids)), [len(x) for x in ids])
        return Entries(self._put(rows), self._put(flat))

    def _rows_with(self, lists: Sequence[_Lists | None], name: str) -> Tensor:
        return self._put(np.array([i for i, x in enumerate(lists) if x is not None and len(getattr(x, name))]))

    def _columns(self, scalars: _Scalars, rows: IntArray, *uses: Use) -> dict[str, Tensor]:
        return {name: self._column(scalars[name][rows]) for use in uses for name in _NEUTRAL[use]}

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)

    def _column(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(np.ascontiguousarray(array), self._device)[:, None]


def _differs(scalars: _Scalars, use: Use) -> npt.NDArray[np.bool_]:
    """Return [num_rows] bool: some scalar of this use differs from its neutral value."""
    differs: npt.NDArray[np.bool_] = reduce(or_, [scalars[name] != neutral for name, neutral in _NEUTRAL[use].items()])
    return differs


@cache
def _greedy(num_rows: int) -> SamplingMetadata:
    """Return the work of a greedy step; cached, at most one per number of slots."""
    return SamplingMetadata(num_rows)
