"""One way of batching the prompts, as steps: which request holds which slot, from which step to which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lineclear.client import Generation
from lineclear.render.timeline import Barrier, Mark, Panel, Segment, Tick, panels
from lineclear.v1 import steps_pb2 as pb


@dataclass(frozen=True)
class Entry:
    """One request in its slot. It prefills in step `first` and samples a token in each step up to `last`."""

    request: int
    slot: int
    first: int
    last: int
    prompt_tokens: int
    token_ids: tuple[int, ...]


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
    """All prompts, one way. Steps count from 1. `batches` is empty with continuous batching.

    `records`: the executed steps of a service, with the numbers of the prompts as requests.
    """

    name: str
    what: str
    entries: tuple[Entry, ...]
    seconds: float
    slots: int
    batches: tuple[Batch, ...] = ()
    is_padded: bool = False
    records: tuple[pb.StepRecord, ...] = ()

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

    def mixed_step(self) -> pb.StepRecord:
        """Return the first step with a prompt beside the most decodes."""
        return max(self.records, key=lambda step: _decodes(step) if _decodes(step) < len(step.rows.kind) else -1)

    def panel(self) -> Panel:
        """Return the lanes of the timeline: those of the executed steps, or of the padded waves."""
        subtitle = f"{self.used_share:.0%} of the slots' steps compute an answer, {self.padding} padding tokens"
        base = panels(self.records)[0] if self.records else self._padded_panel()
        return replace(base, title=f"{self.what}: {self.steps} steps", subtitle=subtitle)

    def _padded_panel(self) -> Panel:
        segments, ticks = [], []
        for batch in self.batches:
            for e in batch.entries:
                segments.append(Segment(e.slot, e.first - 1, e.first, Mark.PREFILL, e.request))
                segments.append(Segment(e.slot, e.first, e.last, Mark.DECODE, e.request))
                ticks.append(Tick(e.slot, e.last - 1, Mark.END))
                if batch.waited(e):
                    segments.append(Segment(e.slot, e.last, batch.end, Mark.PADDING, e.request))
        barriers = tuple(Barrier(batch.begin - 1, "barrier") for batch in self.batches[1:])
        lanes = tuple(f"slot {number}" for number in range(self.slots))
        return Panel("", "", lanes, self.steps, tuple(segments), tuple(ticks), barriers, first_step=1)


def _decodes(step: pb.StepRecord) -> int:
    return list(step.rows.kind).count(pb.ROW_KIND_DECODE)


def of_answers(
    name: str, what: str, answers: Sequence[Generation], seconds: float, records: Sequence[pb.StepRecord], static: bool
) -> Run:
    """Return the run of a lineclear service. `records` are its steps, those before the run included."""
    base = min(answer.started.first_step for answer in answers) - 1
    entries = tuple(
        Entry(
            request,
            answer.started.slot,
            answer.started.first_step - base,
            answer.timings.last_step - base,
            answer.usage.prompt_tokens,
            answer.token_ids,
        )
        for request, answer in enumerate(answers, 1)
    )
    slots = records[0].num_slots
    steps = tuple(_named(record, record.step - base, entries) for record in records if record.step > base)
    return Run(name, what, entries, seconds, slots, _batches(entries, slots) if static else (), records=steps)


def _named(record: pb.StepRecord, step: int, entries: Sequence[Entry]) -> pb.StepRecord:
    """Return the step with its number in the run, and the numbers of the prompts instead of those of arrival."""
    named = pb.StepRecord()
    named.CopyFrom(record)
    named.step = step
    named.rows.request[:] = (_entry_at(step, slot, entries).request for slot in record.rows.slot)
    numbers = dict(zip(record.rows.request, named.rows.request, strict=True))
    named.ended[:] = (numbers[request] for request in record.ended if request in numbers)
    return named


def _entry_at(step: int, slot: int, entries: Sequence[Entry]) -> Entry:
    return next(entry for entry in entries if entry.slot == slot and entry.first <= step <= entry.last)


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
