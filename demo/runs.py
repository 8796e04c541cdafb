"""One way of batching the prompts, as steps: which request holds which slot, from which step to which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lineclear.client import Generation
from lineclear.render.step_record import RowKind, StepRow
from lineclear.render.timeline import Barrier, Mark, Panel, Segment, Tick


@dataclass(frozen=True)
class Entry:
    """One request in its slot. It prefills in step `first` and samples a token in each step up to `last`."""

    request: int
    slot: int
    first: int
    last: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    queued_seconds: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Requests that start together; the next batch waits until step `end`."""

    entries: tuple[Entry, ...]
    end: int
    left_padding: int = 0
    """Positions in front of shorter prompts."""

    @property
    def begin(self) -> int:
        """Return the first step."""
        return min(entry.first for entry in self.entries)

    def waited(self, entry: Entry) -> int:
        """Return the steps between the end of an answer and the end of the batch."""
        return self.end - entry.last


@dataclass(frozen=True)
class Run:
    """All prompts, one way. Steps count from 1. `batches` is empty with continuous batching."""

    name: str
    what: str
    entries: tuple[Entry, ...]
    seconds: float
    slots: int
    batches: tuple[Batch, ...] = ()
    is_padded: bool = False

    @property
    def steps(self) -> int:
        """Return the steps from the first prompt to the last token."""
        return max(entry.last for entry in self.entries)

    @property
    def tokens(self) -> int:
        """Return the output tokens."""
        return sum(len(entry.token_ids) for entry in self.entries)

    @property
    def used_share(self) -> float:
        """Return the share of slots and steps that compute an answer."""
        return sum(entry.last - entry.first + 1 for entry in self.entries) / (self.slots * self.steps)

    @property
    def padding(self) -> int:
        """Return the computed positions that belong to no answer."""
        if not self.is_padded:
            return 0
        return sum(batch.left_padding + sum(map(batch.waited, batch.entries)) for batch in self.batches)

    def rows(self, step: int) -> list[StepRow]:
        """Return the packed rows of a step: decodes in order of their slots, then prompts."""
        found = []
        for entry in sorted(self.entries, key=lambda entry: (entry.first == step, entry.slot)):
            if entry.first == step:
                found.append(StepRow(entry.slot, entry.request, 0, entry.prompt_tokens, RowKind.PREFILL))
            elif entry.first < step <= entry.last:
                position = entry.prompt_tokens + step - entry.first - 1
                found.append(StepRow(entry.slot, entry.request, position, 1, RowKind.DECODE))
        return found

    def mixed_step(self) -> int:
        """Return the first step with a prompt beside the most decodes."""
        return max(
            sorted({entry.first for entry in self.entries}),
            key=lambda step: sum(row.kind is RowKind.DECODE for row in self.rows(step)),
        )

    def panel(self) -> Panel:
        """Return the lanes of the timeline."""
        segments, ticks = [], []
        for e in self.entries:
            segments.append(Segment(e.slot, e.first - 1, e.first, Mark.PREFILL, e.request))
            segments.append(Segment(e.slot, e.first, e.last, Mark.DECODE, e.request))
            ticks.append(Tick(e.slot, e.last - 1, Mark.END))
        if self.is_padded:
            segments += (
                Segment(entry.slot, entry.last, batch.end, Mark.PADDING, entry.request)
                for batch in self.batches
                for entry in batch.entries
                if batch.waited(entry)
            )
        return Panel(
            title=f"{self.what}: {self.steps} steps",
            subtitle=f"{self.used_share:.0%} of the slots' steps compute an answer, {self.padding} padding tokens",
            lanes=tuple(f"slot {number}" for number in range(self.slots)),
            columns=self.steps,
            segments=tuple(segments),
            ticks=tuple(ticks),
            barriers=tuple(Barrier(batch.begin - 1, "barrier") for batch in self.batches[1:]),
            first_step=1,
        )


def of_answers(name: str, what: str, answers: Sequence[Generation], seconds: float, slots: int, static: bool) -> Run:
    """Return the run of a lineclear service."""
    base = min(answer.started.first_step for answer in answers) - 1
    entries = tuple(
        Entry(
            request,
            answer.started.slot,
            answer.started.first_step - base,
            answer.timings.last_step - base,
            answer.usage.prompt_tokens,
            answer.token_ids,
            answer.timings.queue_time_seconds,
        )
        for request, answer in enumerate(answers, 1)
    )
    return Run(name, what, entries, seconds, slots, _batches(entries, slots) if static else ())


def _batches(entries: Sequence[Entry], slots: int) -> tuple[Batch, ...]:
    """Return the fixed batches, in which each request starts after all of the one before have ended."""
    in_order = sorted(entries, key=lambda entry: (entry.first, entry.slot))
    groups = [tuple(in_order[at : at + slots]) for at in range(0, len(in_order), slots)]
    return tuple(Batch(group, max(entry.last for entry in group)) for group in groups)


def of_waves(name: str, what: str, waves: Sequence[dict[str, Any]], seconds: float, slots: int) -> Run:
    """Return the run of `padded_waves`."""
    entries: list[Entry] = []
    batches: list[Batch] = []
    begin = 1
    for wave in waves:
        end = begin + max(map(len, wave["token_ids"])) - 1
        group = tuple(
            Entry(len(entries) + slot + 1, slot, begin, begin + len(ids) - 1, prompt, tuple(ids))
            for slot, (prompt, ids) in enumerate(zip(wave["prompt_tokens"], wave["token_ids"], strict=True))
        )
        entries += group
        batches.append(Batch(group, end, sum(wave["width"] - prompt for prompt in wave["prompt_tokens"])))
        begin = end + 1
    return Run(name, what, tuple(entries), seconds, slots, tuple(batches), is_padded=True)
