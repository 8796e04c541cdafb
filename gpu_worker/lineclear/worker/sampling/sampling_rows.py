"""The sampling rows of a step on the host, and the interface of the features that change their logits.

A feature is an entry in `logit_changes.FEATURES`. Requests and rows that do not use it cost nothing: the table of
sampling parameters calls a feature only for those that do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lineclear.wire.sampling import SCALARS, Sampling, Use
from lineclear.worker.attention.base import IntArray
from lineclear.worker.device.staging import Put

SCALARS_DTYPE = np.dtype([(name, scalar.format) for name, scalar in SCALARS.items()], align=True)
Scalars = npt.NDArray[np.void]
"""[num_rows] of `SCALARS_DTYPE`."""
NEUTRAL = {use: {name: getattr(Sampling(), name) for name, x in SCALARS.items() if x.use is use} for use in Use}
SWITCHES = {use: {name: x for name, x in NEUTRAL[use].items() if SCALARS[name].is_switch} for use in Use}

Entries = tuple[Tensor, Tensor]
"""Single logits, as (sampling rows, token ids)."""
Change = Callable[[Tensor, Tensor], object]
"""(logits [num_rows, vocabulary] float32, token table [num_slots, positions]): changes some logits in place."""


class Feature(NamedTuple):
    """A change of logits before the log-probabilities and the draw."""

    switches: Collection[str]
    """Fields of Sampling; a request may use the feature if one of them has not its default value."""
    parameters: Callable[[Sampling, int], Any]
    """(parameters of such a request, vocabulary) -> what its slot keeps. None: it does not use the feature."""
    prepare: Callable[[SamplingRows, list[Any]], Change | None]
    """(rows that use the feature, what their slots keep) -> the change of this step. None: no row needs it yet."""


class Context(NamedTuple):
    """Where the tokens of some rows are in the token table, on the device. Columns are [num_rows, 1]."""

    rows: Tensor
    """[num_rows]: indices among the sampling rows."""
    slots: Tensor
    """[num_rows]."""
    lengths: Tensor
    """Number of tokens so far."""
    prompt_lens: Tensor
    max_length: int


class SamplingRows(NamedTuple):
    """Sampling rows of a step. Arrays are [num_rows]."""

    indices: IntArray
    """Index of each row among all sampling rows of the step."""
    slots: IntArray
    lengths: IntArray
    """Number of tokens so far, which is the position of the sampled token."""
    prompt_lens: IntArray
    scalars: Scalars
    put: Put
    """Brings an array to the device; its values may arrive later."""

    @property
    def num_outputs(self) -> IntArray:
        """Return the number of output tokens so far."""
        return self.lengths - self.prompt_lens

    def take(self, chosen: Sequence[int] | IntArray) -> SamplingRows:
        columns = self.indices[chosen], self.slots[chosen], self.lengths[chosen], self.prompt_lens[chosen]
        return SamplingRows(*columns, self.scalars[chosen], self.put)

    def context(self) -> Context:
        lengths, prompt_lens = self.column(self.lengths), self.column(self.prompt_lens)
        return Context(self.put(self.indices), self.put(self.slots), lengths, prompt_lens, int(self.lengths.max()))

    def entries(self, ids: Sequence[IntArray]) -> Entries:
        """Return the logits of `ids[i]` in each row i."""
        return self.put(np.repeat(self.indices, [len(x) for x in ids])), self.put(np.concatenate(ids))

    def parameter(self, name: str) -> Tensor:
        """Return a scalar parameter as a column."""
        return self.column(self.scalars[name])

    def column(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return [num_rows, 1] on the device."""
        return self.put(np.ascontiguousarray(array))[:, None]


def id_array(ids: Sequence[int]) -> IntArray | None:
    """Return distinct token ids in ascending order; None for none."""
    return np.array(sorted(set(ids)), np.int64) if ids else None
