"""The lines of `lineclear top`, from states and steps without a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console
from support.steps import decode, record

from lineclear.client import StepRow
from lineclear.render.top_view import WINDOW_SECONDS, TopHistory, view
from lineclear.v1 import steps_pb2 as pb

WORKER = pb.WatchedWorker(
    worker=0, epoch=7, device="cpu", num_slots=4, num_running=1, steps_in_flight=2, steps=12, num_blocks=8,
    block_size=16, blocks_used=3, blocks_shared=1, blocks_cached=2, block_map=bytes([2, 2, 3, 1, 1, 0, 0, 0]),
    load_seconds=3.25, weight_bytes=235 << 20, kv_cache_bytes=64 << 20,
)  # fmt: skip
RUNNING = pb.RunningRequest(
    request=5, worker=0, slot=1, prompt_tokens=10, max_tokens=30, position=19, cached_tokens=4, preemptions=2
)


def waiting(request: int, prompt: int, waited: float, *, is_resuming: bool = False) -> pb.WaitingRequest:
    return pb.WaitingRequest(
        request=request, prompt_tokens=prompt, max_tokens=20, waited=timedelta(seconds=waited), is_resuming=is_resuming
    )


STATE = pb.SchedulerState(
    taken_at=timedelta(seconds=100), num_waiting=3, num_tokens_waiting=44,
    waiting=(waiting(6, 12, 1.5), waiting(2, 9, 0.25, is_resuming=True)),
    running=(RUNNING,), workers=(WORKER,), generation_tokens=50,
    prefix_cache_queries=200, prefix_cache_hits=50, preemptions=2,
)  # fmt: skip


def changed(message: Any, **fields: Any) -> Any:
    """Return a copy of a message with other fields."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    return copy


def at(seconds: float) -> pb.SchedulerState:
    return changed(STATE, taken_at=timedelta(seconds=seconds))  # type: ignore[no-any-return]


def steps(*times: float, worker: int = 0, seconds: float = 0.01) -> list[pb.StepRecord]:
    """Return steps of two sampling rows, and one that samples nothing, that end at these times."""
    rows = decode(0, 0, 9), decode(1, 1, 9), StepRow(2, 2, 0, 8, 0, "prefill", False)
    return [
        record(n, *rows, at=end, seconds=seconds, total_time=timedelta(), worker=worker) for n, end in enumerate(times)
    ]


def text(history: TopHistory, notice: str = "", width: int = 100, height: int | None = 40) -> list[str]:
    console = Console(width=width, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(history, "host:1", notice, width, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def history(state: pb.SchedulerState | None = STATE, records: Sequence[pb.StepRecord] = ()) -> TopHistory:
    found = TopHistory()
    found.add(pb.WatchStepsResponse(steps=records, state=state))
    return found


def test_view_of_a_state() -> None:
    lines = "\n".join(text(history()))
    assert "prefix hits 25%" in lines
    assert "queue 3 waiting, 44 tokens   next: [6] 12+20 1.5 s, [2] 9+20 again 0.2 s" in lines
    assert "slots 1 of 4 in use" in lines
    assert re.search(r"slot   1 \[5\] ▒+█+·+ 10/30 tokens, prompt 10 \(4 cached\), preempted 2x", lines)
    assert "worker 0 cpu, 1 of 4 slots, step 12   ready after 3.2 s, weight 235 MiB, kv cache 64 MiB" in lines
    assert "█ 2 in use  ▓ 1 shared  ░ 2 cached  · 3 free" in lines
    assert "██▓░░···" in lines


def test_states_have_a_line_where_the_model_has_some() -> None:
    assert "states" not in "\n".join(text(history()))
    worker = changed(WORKER, num_state_snapshots=12, state_snapshots_used=5, state_snapshot_hits=7)
    lines = text(history(changed(STATE, workers=(worker,))))
    assert "states 1 of 4 in slots, 5 of 12 snapshots used, 7 free, 7 hits" in lines
    assert lines.index("states 1 of 4 in slots, 5 of 12 snapshots used, 7 free, 7 hits") == len(lines) - 2


def test_bar_shows_shares_of_prompt_and_answer() -> None:
    running = changed(RUNNING, prompt_tokens=10, max_tokens=30, position=20)
    (line,) = (line for line in text(history(changed(STATE, running=(running,))), width=120) if "[5]" in line)
    bar = re.search(r"[▒█·]+", line)
    assert bar is not None
    length = len(bar[0])
    assert bar[0].count("▒") == bar[0].count("█") == pytest.approx(length / 4, abs=1)
    assert bar[0].count("·") == pytest.approx(length / 2, abs=1)


@pytest.mark.parametrize("width", [20, 44, 80, 200])
@pytest.mark.parametrize("height", [1, 3, 9, 24])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_view_fits(width: int, height: int, workers: int) -> None:
    many = tuple(changed(RUNNING, request=n, slot=n) for n in range(300))
    map_of_many = changed(WORKER, block_map=bytes([0, 1, 2, 3] * 1000), num_blocks=4000)
    state = changed(STATE, running=many, workers=tuple(changed(map_of_many, worker=n) for n in range(workers)))
    lines = text(history(state), width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_slots_that_do_not_fit_are_counted() -> None:
    many = history(changed(STATE, running=tuple(changed(RUNNING, request=n, slot=n) for n in range(300))))
    lines = text(many, height=24)
    shown = sum("  slot" in line for line in lines)
    assert f"  and {300 - shown} more" in lines
    assert any("KV blocks" in line for line in lines)
    assert sum("  slot" in line for line in text(many, height=None)) == 300


def test_cell_of_several_blocks_shows_use_before_free() -> None:
    worker = changed(WORKER, block_map=bytes([0, 0, 0, 2] * 500), num_blocks=2000)
    lines = text(history(changed(STATE, workers=(worker,))), width=44)
    assert any(re.fullmatch(r"  \d+ blocks in a cell", line) for line in lines)
    cells = "".join(line.strip() for line in lines if re.fullmatch(r"  [█·]+", line))
    assert set(cells) == {"█"}


def test_rates_are_of_sampling_rows_in_the_window() -> None:
    found = history(None, steps(90.0, 96.0, 97.0, 99.0))
    found.add(pb.WatchStepsResponse(state=STATE))
    assert found.tokens_per_second == 3 * 2 / WINDOW_SECONDS
    assert found.rows_per_step == 3
    assert found.step_seconds() == pytest.approx(0.01)
    found.elapse(WINDOW_SECONDS)
    assert found.tokens_per_second == 0.0
    assert found.step_seconds() is None


def test_curve_has_a_value_for_each_second() -> None:
    found = history(None, steps(10.2, 10.9, 12.5))
    found.add(pb.WatchStepsResponse(state=at(14.1)))
    assert list(found.curve) == [4, 0, 2, 0]


def test_server_with_another_clock_begins_again() -> None:
    found = history(STATE, steps(99.0))
    found.add(pb.WatchStepsResponse(steps=steps(3.0), state=at(3.1)))
    assert found.tokens_per_second == pytest.approx(2 / 0.1)
    assert list(found.curve) == []


def test_step_time_is_of_each_worker() -> None:
    found = history(STATE, steps(99.0) + steps(99.5, worker=1, seconds=0.03))
    assert found.step_seconds(0) == 0.01
    assert found.step_seconds(1) == 0.03


def test_notice_replaces_the_rates() -> None:
    assert text(TopHistory(), "waiting for host:1")[1] == "waiting for host:1"
    assert text(history(), "waiting for host:1")[1] == "waiting for host:1"


def test_draining_and_missing_workers_are_said() -> None:
    lines = text(history(changed(STATE, draining=True, workers=(), running=())))
    assert "draining" in lines[0]
    assert "no worker has joined" in lines
