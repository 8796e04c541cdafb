"""Drafters, and the acceptance of their drafts: the leading ones of each row that equal the samples at their positions.

Sampling is a pure function of logits, seed and position, so the accepted tokens are those of plain decoding, sampled
ones too. This is stricter than the acceptance of Leviathan et al. (2023), which keeps only the distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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


class Drafter:
    """Makes drafts before the step that verifies them. This one makes none: recurrent states cannot take them back."""

    def reset(self) -> None:
        """Forget every slot."""

    def forget(self, slot: int) -> None:
        """Forget the sequence of a slot that gets another one."""

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        """Return drafts for rows that may verify some. Rows without drafts are left out."""
        return NO_DRAFTS


def verified(result: StepResult, plan: StepPlan, drafts: Drafts) -> StepResult:
    """Return `result`, which has a sample for each position with a draft, without the samples behind a wrong draft.

    The rows that `result` names are indices of samples. A row ends before a stuck or bad sample: its next row fails the
    request. A deferred row has no drafts.
    """
    unusable = result.stuck_rows | result.bad_rows
    kept, counts, num_drafted = list[int](), list[int](), list[int]()
    rows, first = dict[int, int](), 0  # the row of each first sample
    for slot in (*plan.decodes.slots, *(row.slot for row in plan.chunks if row.sample)):
        drafted = drafts.get(slot, ())
        count = 1
        while (
            count <= len(drafted)
            and result.tokens[first + count - 1] == drafted[count - 1]
            and unusable.isdisjoint((first, first + count))
        ):
            count += 1
        rows[first] = len(counts)
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
        bad_rows=frozenset(rows[i] for i in result.bad_rows & rows.keys()),
        stuck_rows=frozenset(rows[i] for i in result.stuck_rows & rows.keys()),
        deferred_rows=frozenset(rows[i] for i in result.deferred_rows & rows.keys()),
    )
