"""What `lineclear top` remembers between two redraws, and its lines for a terminal of any size."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from rich.console import Group
from rich.text import Text

from lineclear.client.admin_results import seconds_of
from lineclear.v1 import steps_pb2 as pb

WINDOW_SECONDS = 5.0
"""Rates are means over the last so many seconds."""
BINS = 120
"""Seconds of the curve of tokens per second."""
FREE, CACHED, USED, SHARED = "·", "░", "█", "▓"
_STYLES = {FREE: "dim", CACHED: "green", USED: "blue", SHARED: "magenta"}
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_DONE, _BAR_PROMPT, _BAR_LEFT = "█", "▒", "·"
_MAX_MAP_LINES = 6
_ALL = 1_000_000
_HEAD_LINES = 4
_MIN_SLOT_LINES = 4
_FIGURES = 56
"""Characters behind a progress bar, at most."""


class TopHistory:
    """The last steps and the last state of a server. Times are those of the server; `elapse` moves them on."""

    def __init__(self) -> None:
        self.state: pb.SchedulerState | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps: deque[pb.StepRecord] = deque()
        self._bins = Counter[int]()  # tokens of each second
        self._now_seconds = 0.0
        self._begun_seconds: float | None = None

    def add(self, watched: pb.WatchStepsResponse) -> None:
        """Add what the server sent. Begins again if the time is that of another server."""
        times = [*map(_ended, watched.steps)]
        if watched.HasField("state"):
            self.state = watched.state
            times.append(seconds_of(watched.state.taken_at))
        if times and max(times) < self._now_seconds - WINDOW_SECONDS:
            self._begin()
        if times and self._begun_seconds is None:
            self._begun_seconds = min(times)
        for step in watched.steps:
            self._bins[int(_ended(step))] += _tokens(step)
        self._steps.extend(watched.steps)
        self.elapse(max(0.0, max(times, default=0.0) - self._now_seconds))

    def elapse(self, seconds: float) -> None:
        """Let the time pass in which the server sent nothing: its rates fall to 0."""
        self._now_seconds += seconds
        while self._steps and _ended(self._steps[0]) < self._now_seconds - WINDOW_SECONDS:
            self._steps.popleft()
        for second in [second for second in self._bins if second < self._now_seconds - BINS - 1]:
            del self._bins[second]

    @property
    def tokens_per_second(self) -> float:
        """Return the sampled tokens per second over the window, or since the first response if that is shorter."""
        begun = self._now_seconds if self._begun_seconds is None else self._begun_seconds
        span = min(WINDOW_SECONDS, max(self._now_seconds - begun, 0.1))
        return sum(map(_tokens, self._steps)) / span

    @property
    def curve(self) -> Sequence[int]:
        """Return the tokens of each of the last seconds, oldest first. The running second is left out."""
        now = int(self._now_seconds)
        first = min(self._bins, default=now)
        return [self._bins[second] for second in range(max(first, now - BINS), now)]

    def step_seconds(self, worker: int | None = None) -> float | None:
        """Return the mean time of the last steps, of one worker or of all; None without steps."""
        times = [seconds_of(step.step_time) for step in self._steps if worker in (None, step.worker)]
        return sum(times) / len(times) if times else None

    @property
    def rows_per_step(self) -> float | None:
        """Return the mean rows of the last steps; None without steps."""
        return sum(len(step.rows.slot) for step in self._steps) / len(self._steps) if self._steps else None


def _ended(step: pb.StepRecord) -> float:
    return seconds_of(step.planned_at) + seconds_of(step.total_time)


def _tokens(step: pb.StepRecord) -> int:
    return sum(step.rows.samples)


def view(history: TopHistory, target: str, notice: str, width: int, height: int | None) -> Group:
    """Return what fits in `width` and `height`; None: all of it. `notice` replaces the rates: why nothing is new."""
    lines = [*islice(_lines(history, target, notice, width, _ALL if height is None else height), height)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines)


def _lines(history: TopHistory, target: str, notice: str, width: int, height: int) -> Iterator[Text]:
    state = history.state
    yield Text.assemble(
        ("lineclear top ", "bold"), target, ("  draining", "bold red") if state and state.draining else ""
    )
    yield Text(notice, style="yellow") if notice else _rates(history)
    if state is None:
        return
    yield Text.assemble(("a second  ", "dim"), (_sparkline(history.curve, max(10, width - 12)), "green"))
    yield _queue(state, width)
    most_map_lines = max(
        1, min(_MAX_MAP_LINES, (height - _HEAD_LINES - _MIN_SLOT_LINES) // max(1, len(state.workers)) - 3)
    )
    if not state.workers:
        yield Text("no worker has joined", style="yellow")
    maps = [_block_map(worker, width, most_map_lines) for worker in state.workers]
    below = sum(3 + len(lines) for lines in maps) + sum(worker.num_state_snapshots > 0 for worker in state.workers)
    yield from _slots(state, width, max(_MIN_SLOT_LINES, height - _HEAD_LINES - below))
    for worker, lines in zip(state.workers, maps, strict=True):
        yield Text("")
        yield from _worker(history, worker)
        yield from lines


def _rates(history: TopHistory) -> Text:
    state = history.state
    assert state is not None
    seconds, rows = history.step_seconds(), history.rows_per_step
    hits = state.prefix_cache_hits / state.prefix_cache_queries if state.prefix_cache_queries else None
    figures = (
        ("tokens/s", f"{history.tokens_per_second:.1f}"),
        ("step", "-" if seconds is None else f"{seconds * 1000:.1f} ms"),
        ("rows/step", "-" if rows is None else f"{rows:.1f}"),
        ("prefix hits", "-" if hits is None else f"{hits:.0%}"),
        ("preemptions", f"{state.preemptions}"),
        ("workers", _workers(state)),
    )
    text = Text()
    for name, value in figures:
        text.append(f"{name} ", "dim").append(value, "bold").append("   ")
    return text


def _workers(state: pb.SchedulerState) -> str:
    count, wanted = len(state.workers), state.num_workers_wanted
    return f"{count} of {wanted}" if count < wanted else f"{count}"


def _sparkline(values: Sequence[int], width: int) -> str:
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(shown)
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(value / top * len(_SPARKS)))] for value in shown)


def _queue(state: pb.SchedulerState, width: int) -> Text:
    text = Text.assemble(("queue ", "bold"), f"{state.num_waiting} waiting, {state.num_tokens_waiting} tokens")
    if state.waiting:
        text.append("   next: ", "dim").append(", ".join(map(_waiting, state.waiting[: max(1, width // 24)])))
    return text


def _waiting(request: pb.WaitingRequest) -> str:
    again = " again" if request.is_resuming else ""
    tokens = f"{request.prompt_tokens}+{request.max_tokens}"
    return f"[{request.request}] {tokens}{again} {seconds_of(request.waited):.1f} s"


def _slots(state: pb.SchedulerState, width: int, most: int) -> Iterator[Text]:
    """Yield at most `most` lines."""
    slots = sum(worker.num_slots for worker in state.workers)
    yield Text.assemble(
        ("slots ", "bold"), f"{len(state.running)} of {slots} in use   ",
        (f"{_BAR_PROMPT} prompt {_BAR_DONE} answer {_BAR_LEFT} to come, at most", "dim"),
    )  # fmt: skip
    in_order = sorted(state.running, key=lambda request: (request.worker, request.slot))
    shown = in_order if len(in_order) < most else in_order[: most - 2]
    for request in shown:
        yield _slot(request, len(state.workers) > 1, width)
    if len(shown) < len(in_order):
        yield Text(f"  and {len(in_order) - len(shown)} more", style="dim")


def _slot(request: pb.RunningRequest, names_worker: bool, width: int) -> Text:
    name = f"  worker {request.worker} slot {request.slot:3} " if names_worker else f"  slot {request.slot:3} "
    done = max(0, request.position - request.prompt_tokens + 1)
    figures = f" {done}/{request.max_tokens} tokens, prompt {request.prompt_tokens}"
    if request.cached_tokens:
        figures += f" ({request.cached_tokens} cached)"
    if request.preemptions:
        figures += f", preempted {request.preemptions}x"
    label = f"[{request.request}] "
    bar = max(10, min(60, width - len(name) - len(label) - _FIGURES))
    total = request.prompt_tokens + request.max_tokens
    computed = round(bar * min(1.0, request.position / total))
    prompt = min(computed, round(bar * request.prompt_tokens / total))
    return Text.assemble(
        (name, "dim"), (label, "bold"), (_BAR_PROMPT * prompt, "yellow"), (_BAR_DONE * (computed - prompt), "blue"),
        (_BAR_LEFT * (bar - computed), "dim"), figures,
    )  # fmt: skip


def _worker(history: TopHistory, worker: pb.WatchedWorker) -> Iterator[Text]:
    free = worker.num_blocks - worker.blocks_used - worker.blocks_cached
    seconds = history.step_seconds(worker.worker)
    step = "" if seconds is None else f", {seconds * 1000:.1f} ms a step"
    slots = f"{worker.num_running} of {worker.num_slots} slots"
    start = f"   ready after {worker.load_seconds:.1f} s"
    for what in ("weight", "kv_cache", "step_memory"):
        if num_bytes := getattr(worker, f"{what}_bytes"):
            start += f", {what.replace('_', ' ')} {num_bytes / 2**20:.0f} MiB"
    figures = f"{worker.device}, {slots}, step {worker.steps}{step}"
    yield Text.assemble((f"worker {worker.worker} ", "bold"), figures, (start, "dim"))
    parts = (USED, worker.blocks_used - worker.blocks_shared, "in use"), (SHARED, worker.blocks_shared, "shared")
    more = (CACHED, worker.blocks_cached, "cached"), (FREE, free, "free")
    text = Text.assemble(("KV blocks ", "bold"), f"{worker.num_blocks} of {worker.block_size} tokens:")
    for mark, count, what in (*parts, *more):
        text.append(f"  {mark} {count} {what}", _STYLES[mark])
    yield text
    if count := worker.num_state_snapshots:
        used = worker.state_snapshots_used
        figures = f"{worker.num_running} of {worker.num_slots} in slots, {used} of {count} snapshots used"
        yield Text.assemble(("states ", "bold"), f"{figures}, {count - used} free, {worker.state_snapshot_hits} hits")


def _block_map(worker: pb.WatchedWorker, width: int, most_lines: int) -> list[Text]:
    """Return the map, several blocks in a cell if there are too many. A cell shows its most common state but free."""
    blocks = worker.block_map
    if not blocks:
        return []
    per_line = max(10, width - 4)
    per_cell = max(1, -(-len(blocks) // (per_line * most_lines)))
    cells = "".join(_cell(blocks[at : at + per_cell]) for at in range(0, len(blocks), per_cell))
    lines = []
    for at in range(0, len(cells), per_line):
        line = Text("  ")
        for cell, run in groupby(cells[at : at + per_line]):
            line.append("".join(run), _STYLES[cell])
        lines.append(line)
    if per_cell > 1:
        lines.insert(0, Text(f"  {per_cell} blocks in a cell", "dim"))
    return lines


def _cell(blocks: bytes) -> str:
    counts = Counter(FREE if b == 0 else CACHED if b == 1 else USED if b == 2 else SHARED for b in blocks)
    del counts[FREE]
    return counts.most_common(1)[0][0] if counts else FREE
