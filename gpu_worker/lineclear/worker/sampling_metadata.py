"""Sampling parameters of every slot as columns, and the part of them that one step needs (vLLM's `SamplingMetadata`).

The table lives on the host. When a plan arrives, it is known which rows are greedy, penalized or restricted, so the
device receives only what it needs; a step of greedy rows receives nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.sampling import SCALARS, Sampling, Use

from .attention.base import IntArray, to_device
from .uniform_noise import XTC_STREAM, uniform

_DTYPE = np.dtype([(name, scalar.format) for name, scalar in SCALARS.items()], align=True)
_NEUTRAL = {use: {name: getattr(Sampling(), name) for name, x in SCALARS.items() if x.use is use} for use in Use}
_SWITCHES = {use: {name: x for name, x in _NEUTRAL[use].items() if SCALARS[name].is_switch} for use in Use}
CONTEXTS = (Use.PENALTY, Use.DRY, Use.NGRAM)
"""Uses of scalars that change logits by the tokens of the context."""
_NO_IDS = np.zeros(0, np.int64)
_NO_LISTS: Mapping[str, IntArray] = {}
_MAX_DECAY = 1e30
"""Larger factors could make a logit infinite."""

_Scalars = npt.NDArray[np.void]
"""[num_rows] of `_DTYPE`."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Single logits: `ids[i]` of sampling row `rows[i]`."""

    rows: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Rows whose logits depend on the tokens before their position. Columns are [num_rows, 1]."""

    rows: Tensor
    parameters: Mapping[str, Tensor]
    """Columns of the scalars of one use."""
    max_values: Mapping[str, float]
    """The largest value of each column, on the host."""
    slots: Tensor
    """[num_rows]."""
    lengths: Tensor
    """Number of tokens so far."""
    prompt_lens: Tensor
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Words of several tokens, each in one row. Columns are [num_words, 1]."""

    last: Entries
    prefixes: Tensor
    """[num_words, longest]: all tokens but the last, padded at the end."""
    prefix_lens: Tensor
    slots: Tensor
    lengths: Tensor
    """Number of tokens of the row so far."""
    prompt_lens: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Breakers:
    """Sequence breakers of DRY, for the rows of its context."""

    is_breaker: Tensor
    """[num_rows, vocabulary] bool: tokens that are a breaker alone."""
    sequences: Tensor
    """[num_rows, most, longest]: breakers of several tokens, padded at the end."""
    sequence_lens: Tensor
    """[num_rows, most]; 0 for none."""


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


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """Sampling work of a step, on the device. None marks parts without work."""

    num_rows: int
    bias: Entries | None = None
    bias_values: Tensor | None = None
    contexts: Mapping[Use, Context] = field(default_factory=dict)
    """Rows with penalties and bans for tokens of their own context, by kind."""
    breakers: Breakers | None = None
    """Of the DRY rows in `contexts`."""
    decay: Entries | None = None
    """End tokens whose logits grow with the length of the answer, and by which factor."""
    decay_factors: Tensor | None = None
    bad_words: BadWords | None = None
    allowed: Entries | None = None
    allowed_rows: Tensor | None = None
    """The distinct rows of `allowed`."""
    banned: Entries | None = None
    forced: Entries | None = None
    """One token a row."""
    draws: Draws | None = None
    truncated_draws: Draws | None = None
    logprob_rows: Tensor | None = None
    """Rows that report log-probabilities."""
    host_logprob_rows: tuple[int, ...] = ()
    num_top: tuple[int, ...] = ()
    """For each row of `logprob_rows`: how many of the most likely tokens to report."""
    logprob_ids: Entries | None = None
    """Tokens whose log-probabilities are reported. Its rows are indices in `logprob_rows`."""
    host_logprob_ids: tuple[Sequence[int], ...] = ()
    """The same for each row of `logprob_rows`."""
    changes_logits: bool = False
    """Some logits change before the draw."""

    @property
    def is_greedy(self) -> bool:
        """Every row only needs the argmax of the model's own logits."""
        is_drawn = self.draws is not None or self.truncated_draws is not None
        return not is_drawn and self.logprob_rows is None and not self.changes_logits


@dataclass(frozen=True, slots=True, eq=False)
class _BadWords:
    """Words of one slot."""

    prefixes: IntArray
    prefix_lens: IntArray
    last: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Breakers:
    """Sequence breakers of one slot."""

    is_breaker: npt.NDArray[np.bool_]
    sequences: Sequence[Sequence[int]]

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> _Breakers:
        is_breaker = np.zeros(vocab_size, np.bool_)
        is_breaker[list(sampling.dry_breaker_ids)] = True
        return cls(is_breaker, sampling.dry_breaker_sequences)


class SamplingTable:
    """Sampling parameters of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._scalars = np.zeros(num_slots, _DTYPE)
        self._lists: list[Mapping[str, IntArray]] = [_NO_LISTS] * num_slots
        """By slot: list parameters that are not empty, by name."""
        self._biases: dict[int, npt.NDArray[np.float32]] = {}
        self._bad_words: dict[int, _BadWords] = {}
        self._breakers: dict[int, _Breakers] = {}
        self._slots_of = {use: set[int]() for use in (*CONTEXTS, Use.TRUNCATION, Use.RESHAPE)}
        """Slots that use a scalar of each kind."""
        self._not_greedy = set[int]()
        """Slots that need more than the argmax of the model's own logits."""

    def set_slot(self, slot: int, sampling: Sampling) -> None:
        """Store the parameters of the slot's new sequence."""
        if sampling.top_k >= self._vocab_size:
            sampling = replace(sampling, top_k=0)
        self._scalars[slot] = tuple(getattr(sampling, name) for name in SCALARS)
        self._lists[slot] = _id_lists(sampling) or _NO_LISTS
        self._biases[slot] = np.array([value for _, value in sampling.logit_bias], np.float32)
        self._bad_words.pop(slot, None)
        if sampling.bad_words:
            self._bad_words[slot] = _bad_words(sampling.bad_words)
        self._breakers.pop(slot, None)
        if sampling.dry_multiplier:
            self._breakers[slot] = _Breakers.of(sampling, self._vocab_size)
        for use, members in self._slots_of.items():
            is_used = any(getattr(sampling, name) != neutral for name, neutral in _SWITCHES[use].items())
            (members.add if is_used else members.discard)(slot)
        changes = any(slot in self._slots_of[use] for use in CONTEXTS)
        is_drawn, is_forced = sampling.temperature > 0, sampling.forced_first_id >= 0
        if self._lists[slot] or sampling.bad_words or changes or is_drawn or is_forced or sampling.logprobs >= 0:
            self._not_greedy.add(slot)
        else:
            self._not_greedy.discard(slot)

    def select(self, slots: list[int], positions: list[int], prompt_lens: IntArray) -> SamplingMetadata:
        """Return the sampling work of a step whose rows have these slots and sample tokens at these positions.

        A slot may have several rows. `prompt_lens` [num_slots].
        """
        if self._not_greedy.isdisjoint(slots):
            return _greedy(len(slots))
        return self._select(np.array(slots, np.int64), np.array(positions, np.int64), prompt_lens)

    def _select(self, slots: IntArray, positions: IntArray, prompt_lens: IntArray) -> SamplingMetadata:
        scalars, prompt_lens = self._scalars[slots], prompt_lens[slots]
        is_drawn = scalars["temperature"] > 0
        is_truncated = self._uses(Use.TRUNCATION, slots) | self._uses(Use.RESHAPE, slots)
        changes = self._changes(slots, positions, prompt_lens, scalars)
        logprob_rows = np.flatnonzero(scalars["logprobs"] >= 0)
        logprob_lists = [self._lists[slot] for slot in slots[logprob_rows]]
        return SamplingMetadata(
            num_rows=len(slots),
            **changes,
            changes_logits=any(part is not None for part in changes.values()),
            draws=self._draws(scalars, positions, is_drawn & ~is_truncated, Use.DRAW),
            truncated_draws=self._draws(scalars, positions, is_drawn & is_truncated, *self._truncations(slots)),
            logprob_rows=self._put(logprob_rows) if len(logprob_rows) else None,
            host_logprob_rows=tuple(logprob_rows.tolist()),
            num_top=tuple(scalars["logprobs"][logprob_rows].tolist()),
            logprob_ids=self._entries(logprob_lists, "logprob_ids"),
            host_logprob_ids=tuple(x.get("logprob_ids", _NO_IDS).tolist() for x in logprob_lists),
        )

    def _changes(
        self, slots: IntArray, positions: IntArray, prompt_lens: IntArray, scalars: _Scalars
    ) -> dict[str, Any]:
        """Return the fields of SamplingMetadata that change logits. Those of unused parameters are left out."""
        found: dict[str, Any] = {}
        num_outputs = positions - prompt_lens
        contexts = {
            use: self._context(use, scalars, slots, positions, prompt_lens) for use in CONTEXTS if self._slots_of[use]
        }
        if any(contexts.values()):
            found["contexts"] = {use: context for use, context in contexts.items() if context is not None}
            found["breakers"] = self._dry_breakers(slots)
        if self._bad_words:
            found["bad_words"] = self._banned_words(slots, positions, prompt_lens)
        found["forced"] = self._forced(scalars["forced_first_id"], num_outputs == 0)
        lists = [self._lists[slot] for slot in slots]
        if not any(lists):
            return found
        bias, allowed = self._entries(lists, "logit_bias"), self._entries(lists, "allowed_ids")
        if bias is not None:
            found |= {"bias": bias, "bias_values": self._put(np.concatenate([self._biases[slot] for slot in slots]))}
        if allowed is not None:
            found |= {"allowed": allowed, "allowed_rows": self._rows_with(lists, "allowed_ids")}
        found["decay"], found["decay_factors"] = self._decay(scalars, lists, num_outputs)
        found["banned"] = self._banned(lists, num_outputs, num_outputs < scalars["min_tokens"])
        return found

    def _context(
        self, use: Use, scalars: _Scalars, slots: IntArray, lengths: IntArray, prompt_lens: IntArray
    ) -> Context | None:
        rows = np.flatnonzero(self._uses(use, slots))
        if not len(rows):
            return None
        return Context(
            rows=self._put(rows),
            parameters=self._columns(scalars[rows], use),
            max_values={name: float(scalars[name][rows].max()) for name in _NEUTRAL[use]},
            slots=self._put(slots[rows]),
            lengths=self._column(lengths[rows]),
            prompt_lens=self._column(prompt_lens[rows]),
            max_length=int(lengths[rows].max()),
        )

    def _uses(self, use: Use, slots: IntArray) -> npt.NDArray[np.bool_]:
        """Return [num_rows] bool: the row's slot has a scalar of this use that is not neutral."""
        members = self._slots_of[use]
        found: npt.NDArray[np.bool_] = np.zeros(len(slots), np.bool_)
        if members:
            found[:] = [slot in members for slot in slots.tolist()]
        return found

    def _truncations(self, slots: IntArray) -> tuple[Use, ...]:
        uses = (Use.DRAW, Use.TRUNCATION)
        return uses if self._slots_of[Use.RESHAPE].isdisjoint(slots.tolist()) else (*uses, Use.RESHAPE)

    def _draws(
        self,
        scalars: _Scalars,
        positions: IntArray,
        is_member: npt.NDArray[np.bool_],
        *uses: Use,
    ) -> Draws | None:
        rows = np.flatnonzero(is_member)
        if not len(rows):
            return None
        scalars, positions = scalars[rows], positions[rows]
        reshapes: dict[str, Tensor] = {}
        if Use.RESHAPE in uses:
            acts = uniform(scalars["seed"], positions, XTC_STREAM) < scalars["xtc_probability"]
            scalars["xtc_probability"] = acts
            scalars["xtc_threshold"][~acts] = 2.0  # no token reaches it
            used = {name: np.flatnonzero(scalars[name] != neutral) for name, neutral in _SWITCHES[Use.RESHAPE].items()}
            reshapes = {name: self._put(indices) for name, indices in used.items() if len(indices)}
        noise = uniform(scalars["seed"], positions)
        return Draws(
            rows=self._put(rows),
            parameters=self._columns(scalars, *uses),
            noise=self._column(noise if self._device.type != "mps" else noise.astype(np.float32)),
            reshapes=reshapes,
        )

    def _dry_breakers(self, slots: IntArray) -> Breakers | None:
        of_rows = [self._breakers[slot] for slot in slots.tolist() if slot in self._breakers]
        if not of_rows:
            return None
        most = max(len(x.sequences) for x in of_rows)
        longest = max((len(sequence) for x in of_rows for sequence in x.sequences), default=0)
        sequences = np.zeros((len(of_rows), most, longest), np.int64)
        lengths = np.zeros((len(of_rows), most), np.int64)
        for row, breakers in enumerate(of_rows):
            for number, sequence in enumerate(breakers.sequences):
                sequences[row, number, : len(sequence)] = sequence
                lengths[row, number] = len(sequence)
        is_breaker = np.stack([x.is_breaker for x in of_rows])
        return Breakers(self._put(is_breaker), self._put(sequences), self._put(lengths))

    def _decay(
        self, scalars: _Scalars, lists: Sequence[Mapping[str, IntArray]], num_outputs: IntArray
    ) -> tuple[Entries | None, Tensor | None]:
        """Return the end tokens whose logits grow, and the factor of each."""
        exponents = num_outputs - scalars["exponential_decay_start"]
        grows = (scalars["exponential_decay_factor"] > 1) & (exponents > 0)
        ends = self._entries(_where(lists, grows), "stop_ids")
        if ends is None:
            return None, None
        factors = np.minimum(scalars["exponential_decay_factor"].astype(np.float64) ** exponents, _MAX_DECAY)
        lengths = [len(x.get("stop_ids", _NO_IDS)) if grown else 0 for x, grown in zip(lists, grows, strict=True)]
        return ends, self._put(np.repeat(factors, lengths).astype(np.float32))

    def _banned_words(self, slots: IntArray, lengths: IntArray, prompt_lens: IntArray) -> BadWords | None:
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._bad_words]
        if not rows:
            return None
        of_rows = [self._bad_words[int(slots[row])] for row in rows]
        width = max(words.prefixes.shape[1] for words in of_rows)
        prefixes = [np.pad(words.prefixes, ((0, 0), (0, width - words.prefixes.shape[1]))) for words in of_rows]
        by_word = np.repeat(rows, [len(words.last) for words in of_rows])
        return BadWords(
            last=Entries(self._put(by_word), self._put(np.concatenate([words.last for words in of_rows]))),
            prefixes=self._put(np.concatenate(prefixes)),
            prefix_lens=self._column(np.concatenate([words.prefix_lens for words in of_rows])),
            slots=self._column(slots[by_word]),
            lengths=self._column(lengths[by_word]),
            prompt_lens=self._column(prompt_lens[by_word]),
        )

    def _banned(
        self, lists: Sequence[Mapping[str, IntArray]], num_outputs: IntArray, is_too_short: npt.NDArray[np.bool_]
    ) -> Entries | None:
        parts = (
            self._entries(lists, "banned_ids"),
            self._entries(_where(lists, num_outputs == 0), "begin_banned_ids"),
            self._entries(_where(lists, is_too_short), "stop_ids"),
        )
        entries = [part for part in parts if part is not None]
        if len(entries) < 2:
            return entries[0] if entries else None
        return Entries(torch.cat([x.rows for x in entries]), torch.cat([x.ids for x in entries]))

    def _forced(self, ids: IntArray, is_first: npt.NDArray[np.bool_]) -> Entries | None:
        rows = np.flatnonzero((ids >= 0) & is_first)
        return Entries(self._put(rows), self._put(ids[rows])) if len(rows) else None

    def _entries(self, lists: Sequence[Mapping[str, IntArray]], name: str) -> Entries | None:
        ids = [x.get(name, _NO_IDS) for x in lists]
        flat = np.concatenate(ids) if ids else _NO_IDS
        if not len(flat):
            return None
        rows = np.repeat(np.arange(len(ids)), [len(x) for x in ids])
        return Entries(self._put(rows), self._put(flat))

    def _rows_with(self, lists: Sequence[Mapping[str, IntArray]], name: str) -> Tensor:
        return self._put(np.array([i for i, x in enumerate(lists) if name in x]))

    def _columns(self, scalars: _Scalars, *uses: Use) -> dict[str, Tensor]:
        return {name: self._column(scalars[name]) for use in uses for name in _NEUTRAL[use]}

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)

    def _column(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(np.ascontiguousarray(array), self._device)[:, None]


def _where(lists: Sequence[Mapping[str, IntArray]], is_member: npt.NDArray[np.bool_]) -> list[Mapping[str, IntArray]]:
    return [x if member else _NO_LISTS for x, member in zip(lists, is_member.tolist(), strict=True)]


def _id_lists(sampling: Sampling) -> dict[str, IntArray]:
    uses_ends = sampling.min_tokens > 0 or sampling.exponential_decay_factor > 1
    lists = {
        "logit_bias": [i for i, _ in sampling.logit_bias],
        "allowed_ids": sorted(set(sampling.allowed_ids)),
        "banned_ids": sorted(set(sampling.banned_ids)),
        "begin_banned_ids": sorted(set(sampling.begin_banned_ids)),
        "stop_ids": sorted(set(sampling.stop_ids)) if uses_ends else [],
        "logprob_ids": sampling.logprob_ids,
    }
    return {name: np.array(ids, np.int64) for name, ids in lists.items() if ids}


def _bad_words(words: Sequence[Sequence[int]]) -> _BadWords:
    prefix_lens = np.array([len(word) - 1 for word in words], np.int64)
    prefixes = np.zeros((len(words), int(prefix_lens.max())), np.int64)
    for row, word in enumerate(words):
        prefixes[row, : len(word) - 1] = word[:-1]
    return _BadWords(prefixes, prefix_lens, np.array([word[-1] for word in words], np.int64))


@cache
def _greedy(num_rows: int) -> SamplingMetadata:
    """Return the work of a greedy step; cached, at most one per number of slots."""
    return SamplingMetadata(num_rows)
