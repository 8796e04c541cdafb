"""Drafters, and the acceptance of their drafts: the leading ones of each row that equal the samples at their positions.

Sampling is a pure function of logits, seed and position, so the accepted tokens are those of plain decoding, sampled
ones too. This is stricter than the acceptance of Leviathan et al. (2023), which keeps only the distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lineclear.wire.messages import Row, StepPlan, StepResult

Drafts = Mapping[int, Sequence[int]]
"""The drafts of a step by slot, for rows that verify some."""


class PendingDrafts(Sequence[int]):
    """Drafts that the device has in the token table. To read them is to wait for the device."""

    def __init__(self, count: int, read: Callable[[], list[int]]) -> None:
        """`read` waits for the tokens and returns them."""
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]


NO_DRAFTS: Drafts = {}


ReadTokens = Callable[[int, int, int], list[int]]
"""(slot, start, end) -> the tokens of the slot at positions [start, end)."""


class Drafter(Protocol):
    """Makes drafts. The runner calls it before the step that verifies them."""

    def reset(self) -> None:
        """Forget every slot."""
        ...

    def forget(self, slot: int) -> None:
        """Forget the sequence of a slot that gets another one."""
        ...

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        """Return drafts for rows that may verify some. Rows without drafts are left out."""
        ...


class NoDrafter:
    """Makes no drafts: for models whose recurrent state cannot be taken back behind a wrong one."""

    def reset(self) -> None:
        """Do nothing."""

    def forget(self, slot: int) -> None:
        """Do nothing."""

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        """Return no drafts."""
        return NO_DRAFTS


def verified(result: StepResult, plan: StepPlan, drafts: Drafts) -> StepResult:
    """Return `result`, which has a sample for each position with a draft, without the samples behind a wrong draft.

    The rows that `result` names are indices of samples. A row ends before a stuck or bad sample: its next row fails the
    request. A deferred row has no drafts.
    """
    unusable = result.stuck_rows | result.bad_rows
    stuck_rows: list[int] = []
    bad_rows: list[int] = []
    deferred_rows: list[int] = []
    kept: list[int] = []
    counts: list[int] = []
    num_drafted: list[int] = []
    first = 0
    for slot in (*plan.decodes.slots, *(row.slot for row in plan.chunks if row.sample)):
        drafted = drafts.get(slot, ())
        count = 1
        while (
            count <= len(drafted)
            and result.tokens[first + count - 1] == drafted[count - 1]
            and unusable.isdisjoint((first, first + count))
        ):
            count += 1
        if first in result.stuck_rows:
            stuck_rows.append(len(counts))
        if first in result.bad_rows:
            bad_rows.append(len(counts))
        if first in result.deferred_rows:
            deferred_rows.append(len(counts))
        kept += range(first, first + count)
        counts.append(count)
        num_drafted.append(len(drafted))
        first += 1 + len(drafted)
    return replace(
        result,
        tokens=tuple(result.tokens[i] for i in kept),
        logprobs=tuple(result.logprobs[i] for i in kept) if result.logprobs else (),
        counts=tuple(counts),
        num_drafted=tuple(num_drafted),
        bad_rows=frozenset(bad_rows),
        stuck_rows=frozenset(stuck_rows),
        deferred_rows=frozenset(deferred_rows),
    )
