"""Sampling parameters of every slot as columns, and the part of them that one step needs (vLLM's `SamplingMetadata`).

The table lives on the host. When a plan arrives, it is known which rows are greedy, penalized or restricted, so the
device receives only what it needs; a step of greedy rows receives nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.sampling import LISTS, SCALARS, Sampling, Use
from lineclear.worker.attention.base import IntArray
from lineclear.worker.device.staging import Put, to_device

from .logit_changes import FEATURES
from .sampling_rows import NEUTRAL, SCALARS_DTYPE, SWITCHES, Change, Entries, Feature, SamplingRows

_DEFAULTS = {name: getattr(Sampling(), name) for name in (*SCALARS, *LISTS)}


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Rows that are drawn from a distribution. Columns are [num_rows, 1]."""

    rows: Tensor
    parameters: Mapping[str, Tensor]
    """Columns of the DRAW scalars; for truncated draws of the TRUNCATION scalars as well."""
    noise: Tensor
    """Uniform in [0, 1); float64 where the device supports it."""
    reshapes: Mapping[str, Tensor] = field(default_factory=dict)
    """By RESHAPE scalar that is a switch: the indices in `rows` of those that use it. Without an entry, none does."""


class LogprobRows(NamedTuple):
    """Rows that report log-probabilities."""

    rows: Tensor
    host_rows: tuple[int, ...]
    num_top: tuple[int, ...]
    """For each row: how many of the most likely tokens to report."""
    ids: Entries | None
    """Tokens whose log-probabilities are reported too; their rows are indices in `rows`."""
    host_ids: tuple[Sequence[int], ...]
    """The same for each row."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """Sampling work of a step, on the device. None marks parts without work."""

    num_rows: int
    changes: Sequence[Change] = ()
    """Changes of logits before the log-probabilities and the draw, in order."""
    draws: Sequence[Draws] = ()
    """From whole distributions, and from truncated ones."""
    logprobs: LogprobRows | None = None
    rows: Sequence[SamplingMetadata] = ()
    """The work of each row by itself; empty: rows are sampled together."""

    @property
    def is_greedy(self) -> bool:
        """Every row only needs the argmax of the model's own logits."""
        return not self.draws and self.logprobs is None and not self.changes


class SamplingTable:
    """Sampling parameters of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, put: Put | None = None) -> None:
        """`put` brings the arrays of a step to the device; None: each at once."""
        self._vocab_size = vocab_size
        self._put = put or partial(to_device, device=device)
        self._noise_dtype = np.float32 if device.type == "mps" else np.float64
        self._scalars = np.zeros(num_slots, SCALARS_DTYPE)
        self._features: list[tuple[Feature, dict[int, Any]]] = [(feature, {}) for feature in FEATURES]
        """Each with its parameters of the slots that use it."""
        self._logprob_ids: dict[int, IntArray] = {}
        self._truncated, self._reshaped = set[int](), set[int]()
        self._not_greedy = set[int]()
        """Slots that need more than the argmax of the model's own logits."""

    def set_slot(self, slot: int, sampling: Sampling) -> None:
        if sampling.top_k >= self._vocab_size:
            sampling = replace(sampling, top_k=0)
        self._scalars[slot] = tuple(getattr(sampling, name) for name in SCALARS)
        given = {name for name, default in _DEFAULTS.items() if getattr(sampling, name) != default}
        is_changed = False
        for feature, by_slot in self._features:
            by_slot.pop(slot, None)
            if given.isdisjoint(feature.switches):
                continue
            if (parameters := feature.parameters(sampling, self._vocab_size)) is not None:
                by_slot[slot], is_changed = parameters, True
        self._logprob_ids[slot] = np.array(sampling.logprob_ids, np.int64)
        is_reshaped = not given.isdisjoint(SWITCHES[Use.RESHAPE])
        for slots, is_member in (
            (self._reshaped, is_reshaped),
            (self._truncated, is_reshaped or not given.isdisjoint(SWITCHES[Use.TRUNCATION])),
            (self._not_greedy, is_changed or sampling.temperature > 0 or sampling.logprobs >= 0),
        ):
            (slots.add if is_member else slots.discard)(slot)

    def select(self, slots: list[int], positions: list[int], prompt_lens: IntArray) -> SamplingMetadata:
        """Return the work of rows with these slots, maybe repeated, and positions. `prompt_lens` [num_slots]."""
        if self._not_greedy.isdisjoint(slots):
            return _greedy(len(slots))
        indices, places = np.array(slots, np.int64), np.arange(len(slots))
        lengths, scalars = np.array(positions, np.int64), self._scalars[indices]
        rows = SamplingRows(places, indices, lengths, prompt_lens[indices], scalars, self._put)
        is_drawn = scalars["temperature"] > 0
        is_truncated = np.array([slot in self._truncated for slot in slots])
        truncations = (Use.DRAW, Use.TRUNCATION, *(() if self._reshaped.isdisjoint(slots) else (Use.RESHAPE,)))
        changes = self._changes(rows, slots)
        whole = self._draws(rows.take(np.flatnonzero(is_drawn & ~is_truncated)), Use.DRAW)
        truncated = self._draws(rows.take(np.flatnonzero(is_drawn & is_truncated)), *truncations)
        draws = [x for x in (whole, truncated) if x is not None]
        logprobs = self._logprobs(rows.take(np.flatnonzero(scalars["logprobs"] >= 0)))
        return SamplingMetadata(len(slots), changes, draws, logprobs)

    def _changes(self, rows: SamplingRows, slots: list[int]) -> list[Change]:
        changes = []
        for feature, by_slot in self._features:
            members = [row for row, slot in enumerate(slots) if slot in by_slot] if by_slot else []
            if members:
                change = feature.prepare(rows.take(members), [by_slot[slots[row]] for row in members])
                changes += [] if change is None else [change]
        return changes

    def _logprobs(self, rows: SamplingRows) -> LogprobRows | None:
        if not len(rows.indices):
            return None
        ids = [self._logprob_ids[slot] for slot in rows.slots.tolist()]
        has_ids, numbered = any(map(len, ids)), rows._replace(indices=np.arange(len(ids)))
        return LogprobRows(
            rows.put(rows.indices),
            tuple(rows.indices.tolist()),
            tuple(rows.scalars["logprobs"].tolist()),
            numbered.entries(ids) if has_ids else None,
            tuple(x.tolist() for x in ids),
        )

    def _draws(self, rows: SamplingRows, *used: Use) -> Draws | None:
        if not len(rows.indices):
            return None
        scalars, reshapes = rows.scalars, dict[str, Tensor]()
        if Use.RESHAPE in used:
            acts = uniform(scalars["seed"], rows.lengths, XTC_STREAM) < scalars["xtc_probability"]
            scalars["xtc_probability"] = acts
            scalars["xtc_threshold"][~acts] = 2.0  # no token reaches it
            switches = SWITCHES[Use.RESHAPE].items()
            members = {name: np.flatnonzero(scalars[name] != neutral) for name, neutral in switches}
            reshapes = {name: rows.put(indices) for name, indices in members.items() if len(indices)}
        noise = uniform(scalars["seed"], rows.lengths)
        return Draws(
            rows=rows.put(rows.indices),
            parameters={name: rows.parameter(name) for use in used for name in NEUTRAL[use]},
            noise=rows.column(noise.astype(self._noise_dtype, copy=False)),
            reshapes=reshapes,
        )


class SamplingTableByRow(SamplingTable):
    """A table whose rows are sampled one by one, so that no operation sees another row."""

    def select(self, slots: list[int], positions: list[int], prompt_lens: IntArray) -> SamplingMetadata:
        metadata = super().select(slots, positions, prompt_lens)
        if metadata.is_greedy:  # an argmax has no rounding
            return metadata
        pairs = zip(slots, positions, strict=True)
        return replace(metadata, rows=[super(SamplingTableByRow, self).select([x], [n], prompt_lens) for x, n in pairs])


@cache
def _greedy(num_rows: int) -> SamplingMetadata:
    """Return the work of a greedy step; cached, at most one per number of slots."""
    return SamplingMetadata(num_rows)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIT = 2.0**-52
_DRAW_STREAM = np.uint64(0)
XTC_STREAM = np.uint64(0x585443)
"""Of the numbers that decide whether XTC acts."""


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], stream: np.uint64 = _DRAW_STREAM
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position) pair. Numbers of other streams are independent.

    Counter-based noise like Philox (Salmon et al. 2011): there is no generator state, so batch composition, chunking,
    preemption and restarts cannot change the samples of a seeded request.
    52 bits of a counter mixed twice: with 53 bits, the product of the number and a sum could round up to the sum.
    """
    counter = _mix((seeds + _GOLDEN) ^ stream) + positions.astype(np.uint64) * _GOLDEN
    bits: npt.NDArray[np.uint64] = _mix(counter) >> np.uint64(12)
    return bits.astype(np.float64) * _UNIT


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
