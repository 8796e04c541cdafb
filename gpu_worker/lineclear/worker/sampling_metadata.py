"""The sampling parameters of every slot as columns, and the part of them that one step needs.

Kept on the host: which rows of a step are greedy, penalised or restricted is known when the plan arrives, so the device
is only given what it has to do, and a step of greedy rows is given nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.messages import Sampling

from .attention import IntArray, on_device
from .uniform_noise import uniform

_SCALARS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("seed", np.uint64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Single logits: `ids[i]` of sampling row `rows[i]`."""

    rows: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Rows that what was said before counts against. Columns are [num_rows, 1]."""

    rows: Tensor
    slots: Tensor
    lengths: Tensor
    """Tokens so far."""
    prompt_lens: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Rows that are drawn, not greedy. Columns are [num_rows, 1]."""

    rows: Tensor
    temperature: Tensor
    noise: Tensor
    """Uniform in [0, 1), float64 where the device has it."""


@dataclass(frozen=True, slots=True, eq=False)
class TruncatedDraws(Draws):
    """Rows that are drawn from the more likely tokens only."""

    top_k: Tensor
    """0: all."""
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """What a step's sampling has to do, on the device. A part that is None has nothing to do."""

    num_rows: int
    bias: Entries | None = None
    bias_values: Tensor | None = None
    penalties: Penalties | None = None
    allowed: Entries | None = None
    allowed_rows: Tensor | None = None
    """The rows that `allowed` names, each once."""
    banned: Entries | None = None
    draws: Draws | None = None
    truncated_draws: TruncatedDraws | None = None
    logprob_rows: Tensor | None = None
    asked: tuple[int, ...] = ()
    """`logprob_rows`, on the host."""
    num_top: tuple[int, ...] = ()
    """For each of them, how many of the most likely tokens to report."""

    @property
    def is_greedy(self) -> bool:
        """The highest logit of every row is all that is asked for."""
        is_drawn = self.draws is not None or self.truncated_draws is not None
        return not is_drawn and self.logprob_rows is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Some logits are not the model's own."""
        return not (self.bias is None and self.penalties is None and self.allowed is None and self.banned is None)


@dataclass(frozen=True, slots=True, eq=False)
class _Lists:
    """The parameters of a slot that are lists."""

    bias_ids: IntArray
    bias_values: npt.NDArray[np.float32]
    allowed: IntArray
    banned: IntArray
    stop: IntArray


class ParameterTable:
    """One line of sampling parameters a slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._scalars = np.zeros(num_slots, _SCALARS)
        self._lists: list[_Lists | None] = [None] * num_slots
        self._others = set[int]()
        """Slots that want something else than the highest logit as it is."""

    def enter(self, slot: int, sampling: Sampling) -> None:
        """The slot has a new owner."""
        if sampling.top_k >= self._vocab_size:
            sampling = replace(sampling, top_k=0)
        self._scalars[slot] = tuple(getattr(sampling, name) for name in _SCALARS.names or ())
        lists = _Lists(
            np.array([i for i, _ in sampling.logit_bias], np.int64),
            np.array([value for _, value in sampling.logit_bias], np.float32),
            np.array(sorted(set(sampling.allowed_ids)), np.int64),
            np.array(sorted(set(sampling.banned_ids)), np.int64),
            np.array(sorted(set(sampling.stop_ids)) if sampling.min_tokens else [], np.int64),
        )
        some = any(len(getattr(lists, name)) for name in ("bias_ids", "allowed", "banned", "stop"))
        self._lists[slot] = lists if some else None
        if some or not _wants_only_the_best(sampling):
            self._others.add(slot)
        else:
            self._others.discard(slot)

    def select(self, slots: list[int], positions: list[int], prompt_lens: IntArray) -> SamplingRows:
        """The work of a step whose sampling rows have these slots and will put their tokens at these positions.

        `prompt_lens` are those of all slots.
        """
        if self._others.isdisjoint(slots):
            return _greedy(len(slots))
        return self._select(np.array(slots, np.int64), np.array(positions, np.int64), prompt_lens)

    def _select(self, slots: IntArray, positions: IntArray, prompt_lens: IntArray) -> SamplingRows:
        scalars, prompt_lens = self._scalars[slots], prompt_lens[slots]
        cut = (scalars["top_k"] > 0) | (scalars["top_p"] < 1) | (scalars["min_p"] > 0)
        drawn = scalars["temperature"] > 0
        lists = [self._lists[slot] for slot in slots]
        bias, allowed = self._entries(lists, "bias_ids"), self._entries(lists, "allowed")
        asked = np.flatnonzero(scalars["logprobs"] >= 0)
        return SamplingRows(
            num_rows=len(slots),
            bias=bias,
            bias_values=None if bias is None else self._put(np.concatenate([x.bias_values for x in lists if x])),
            penalties=self._penalties(scalars, slots, positions, prompt_lens),
            allowed=allowed,
            allowed_rows=None if allowed is None else self._rows_with(lists, "allowed"),
            banned=self._banned(lists, positions - prompt_lens < scalars["min_tokens"]),
            draws=self._draws(scalars, positions, np.flatnonzero(drawn & ~cut)),
            truncated_draws=self._truncated_draws(scalars, positions, np.flatnonzero(drawn & cut)),
            logprob_rows=self._put(asked) if len(asked) else None,
            asked=tuple(asked.tolist()),
            num_top=tuple(scalars["logprobs"][asked].tolist()),
        )

    def _penalties(
        self, s: npt.NDArray[np.void], slots: IntArray, lengths: IntArray, prompt_lens: IntArray
    ) -> Penalties | None:
        neutral = (s["repetition_penalty"] == 1) & (s["presence_penalty"] == 0) & (s["frequency_penalty"] == 0)
        rows = np.flatnonzero(~neutral)
        if not len(rows):
            return None
        return Penalties(
            rows=self._put(rows),
            slots=self._put(slots[rows]),
            lengths=self._column(lengths[rows]),
            prompt_lens=self._column(prompt_lens[rows]),
            repetition=self._column(s["repetition_penalty"][rows]),
            presence=self._column(s["presence_penalty"][rows]),
            frequency=self._column(s["frequency_penalty"][rows]),
            max_length=int(lengths[rows].max()),
        )

    def _draws(self, s: npt.NDArray[np.void], positions: IntArray, rows: IntArray) -> Draws | None:
        if not len(rows):
            return None
        noise = uniform(s["seed"][rows], positions[rows])
        return Draws(
            rows=self._put(rows),
            temperature=self._column(s["temperature"][rows]),
            noise=self._column(noise if self._device.type != "mps" else noise.astype(np.float32)),
        )

    def _truncated_draws(self, s: npt.NDArray[np.void], positions: IntArray, rows: IntArray) -> TruncatedDraws | None:
        draws = self._draws(s, positions, rows)
        if draws is None:
            return None
        return TruncatedDraws(
            rows=draws.rows,
            temperature=draws.temperature,
            noise=draws.noise,
            top_k=self._column(s["top_k"][rows]),
            top_p=self._column(s["top_p"][rows]),
            min_p=self._column(s["min_p"][rows]),
        )

    def _banned(self, lists: Sequence[_Lists | None], too_short: npt.NDArray[np.bool_]) -> Entries | None:
        banned = self._entries(lists, "banned")
        stops = self._entries([x if short else None for x, short in zip(lists, too_short, strict=True)], "stop")
        if banned is None or stops is None:
            return banned or stops
        return Entries(torch.cat([banned.rows, stops.rows]), torch.cat([banned.ids, stops.ids]))

    def _entries(self, lists: Sequence[_Lists | None], name: str) -> Entries | None:
        ids = [getattr(x, name) if x is not None else _NOTHING for x in lists]
        flat = np.concatenate(ids) if ids else _NOTHING
        if not len(flat):
            return None
        rows = np.repeat(np.arange(len(ids)), [len(x) for x in ids])
        return Entries(self._put(rows), self._put(flat))

    def _rows_with(self, lists: Sequence[_Lists | None], name: str) -> Tensor:
        return self._put(np.array([i for i, x in enumerate(lists) if x is not None and len(getattr(x, name))]))

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return on_device(array, self._device)

    def _column(self, array: npt.NDArray[np.generic]) -> Tensor:
        return on_device(np.ascontiguousarray(array), self._device)[:, None]


@cache
def _greedy(num_rows: int) -> SamplingRows:
    """The work of most steps; at most one for each number of slots."""
    return SamplingRows(num_rows)


_NOTHING = np.zeros(0, np.int64)


def _wants_only_the_best(s: Sampling) -> bool:
    """But for what its lists say."""
    unpenalised = s.repetition_penalty == 1 and s.presence_penalty == 0 and s.frequency_penalty == 0
    return s.temperature == 0 and unpenalised and s.logprobs < 0
