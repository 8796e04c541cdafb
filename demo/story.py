"""The report of the demo: admission logs, the mask of a step, the comparison, and the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runs import Batch, Entry, Run

from lineclear.client import step_rows
from lineclear.render.attention_mask import mask_svg, mask_text
from lineclear.render.timeline_svg import timeline_svg

NEXT = (
    ("serve --demo", "a server of your own; it prints how to call and watch it"),
    ("top --target 127.0.0.1:50052", "watch its queue, slots and KV blocks, in another terminal"),
)
"""Commands of `lineclear` to try next, and what they show."""
PAGE = "docs/observability.md", "what each shows, traces for Perfetto, and the mask of any step"


def admission_log(run: Run) -> Iterator[str]:
    """Yield the lines of a log: which request enters which slot at which step, and where a batch waits."""
    yield f"  {run.what}"
    waits = dict(zip((batch.begin for batch in run.batches[1:]), run.batches, strict=False))
    for step in sorted({entry.first for entry in run.entries}):
        if step in waits:
            yield _barrier(run, waits[step])
        entering = sorted((entry for entry in run.entries if entry.first == step), key=lambda entry: entry.slot)
        yield f"    step {step:3}  " + "; ".join(_enters(run, entry) for entry in entering)
    if run.batches:
        yield _barrier(run, run.batches[-1])
    yield f"    step {run.steps:3}  the last answer is complete"


def _enters(run: Run, entry: Entry) -> str:
    text = f"[{entry.request}] enters slot {entry.slot}"
    before = [other for other in run.entries if other.slot == entry.slot and other.last < entry.first]
    if before and not run.batches:
        last = max(before, key=lambda other: other.last)
        steps = entry.first - last.last
        text += f", {'the step' if steps == 1 else f'{steps} steps'} after the last token of [{last.request}]"
    return text


def _barrier(run: Run, batch: Batch) -> str:
    longest = max(batch.entries, key=lambda entry: entry.last)
    waits = ", ".join(f"slot {e.slot} for {batch.waited(e)} steps" for e in batch.entries if batch.waited(e))
    cost = f" and compute {sum(map(batch.waited, batch.entries))} padding tokens" if run.is_padded else ""
    return f"    step {batch.end:3}  ==== barrier ==== [{longest.request}] is the longest; {waits} wait{cost}"


def comparison(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the table; the first run is the one that the others are compared with."""
    yield f"  {'':38} steps  slots in use  padding tokens  seconds  tokens/s      x"
    for run in runs:
        yield (
            f"  {run.name:38} {run.steps:5}  {run.used_share:11.0%}  {run.padding:14}  {run.seconds:7.2f}"
            f"  {run.tokens / run.seconds:8.1f}  {run.seconds / runs[0].seconds:5.2f}"
        )


def tokens_are_equal(runs: Sequence[Run]) -> bool:
    """Return whether all runs gave each prompt the same tokens."""
    answers = [sorted((entry.request, entry.token_ids) for entry in run.entries) for run in runs]
    return all(answer == answers[0] for answer in answers)


def mask(run: Run, width: int) -> str:
    """Return an executed step with prompts and decodes, and its mask."""
    step = run.mixed_step()
    rows = step_rows(step)
    counts = f"{sum(step.rows.num_tokens)} queries of {len(rows)} requests in one packed row, no padding"
    return f"Step {step.step} of continuous batching: {counts}\n\n" + mask_text(rows, width)


def pictures(runs: Sequence[Run]) -> dict[str, str]:
    """Return the SVG files by name: padded static above continuous batching, and the mask."""
    continuous, padded = runs[0], runs[-1]
    step = continuous.mixed_step()
    return {
        "timeline.svg": timeline_svg([padded.panel(), continuous.panel()]),
        "mask.svg": mask_svg(step_rows(step), f"Attention mask of step {step.step}: one packed row, no padding"),
    }
