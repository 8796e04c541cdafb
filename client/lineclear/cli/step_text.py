"""One step in words for `lineclear explain`: its packed rows, positions, blocks, and its mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lineclear.client import StepRecord, StepRow
from lineclear.render.attention_mask import mask_text


def step_text(record: StepRecord, block_size: int | None, width: int) -> str:
    """Return the step. `block_size`: positions of a KV block; None if unknown."""
    queries = sum(row.num_tokens for row in record.rows)
    lines = [
        f"Step {record.step} of worker {record.worker}, {record.seconds * 1000:.2f} ms: {queries} queries of"
        f" {len(record.rows)} requests in one packed row, no padding",
        "",
        *_table(record.rows, block_size),
        "",
        *_changes(record),
        "",
        "Which query attends to which key:",
        "",
    ]
    return "\n".join(lines) + "\n" + mask_text(record.rows, width)


def _table(rows: Sequence[StepRow], block_size: int | None) -> Iterator[str]:
    yield "packed row  slot  request    kind       positions    cached  KV blocks  samples"
    begin = 0
    for row in rows:
        packed = _span(begin, row.num_tokens)
        positions = _span(row.start, row.num_tokens)
        blocks = "-" if block_size is None else str(-(-(row.start + row.num_tokens) // block_size))
        request = f"[{row.request}]"
        yield (
            f"{packed:<10}  {row.slot:4}  {request:<9}  {row.kind:<9}  {positions:<11}  {row.cached_tokens:6}"
            f"  {blocks:>9}  {'a token' if row.samples else '-'}"
        )
        begin += row.num_tokens


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _changes(record: StepRecord) -> Iterator[str]:
    for what, requests in (("started", record.started), ("ended", record.ended), ("preempted", record.preempted)):
        if requests:
            yield f"{what}: {', '.join(f'[{request}]' for request in requests)}"
    free = record.num_blocks - record.blocks_used - record.blocks_cached
    yield (
        f"after it: {record.num_running} of {record.num_slots} slots in use, {record.num_waiting} requests waiting;"
        f" KV blocks: {record.blocks_used} in use, {record.blocks_cached} cached, {free} free"
    )
