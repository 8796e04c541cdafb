"""`lineclear-scheduler replay FILE`: runs the core over a flight recording and compares every decision.

A core loaded from the recording's first entry gets the recorded calls. The first call with another outcome is printed,
with both outcomes.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lineclear.errors import LineclearError
from lineclear.scheduler.core.block_pool import Donor
from lineclear.scheduler.core.dump import BLANK_EOS, BLANK_STOP, BLANK_TOKEN, load, load_core, load_request
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.flight_recorder.recorder import FORMAT, event_summary, plan_summary, to_json_types
from lineclear.wire.messages import RowOutput, Scores, StepError, StepErrorKind, StepPlan, StepResult

_VECTOR = bytes(4)
_PLAIN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("expire", "drain", "clear_prefix_cache"), int),
    **dict.fromkeys(("load_adapter", "unload_adapter"), bytes.fromhex),
    **dict.fromkeys(("switch", "worker_joined"), load),
}
"""Calls whose facts are their arguments, and what reads one of these."""


class NotARecording(Exception):
    """The file cannot be replayed."""


class Divergence(Exception):
    """The core decides otherwise than recorded."""


def main(arguments: list[str]) -> int:
    """Replay the file in `arguments`. Returns 0: all decisions are the same, 1: one differs, 2: not a recording."""
    if len(arguments) != 1:
        print("usage: lineclear-scheduler replay FILE", file=sys.stderr)
        return 2
    try:
        lines = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
        count = replay(json.loads(line) for line in lines)
    except Divergence as error:
        print(error)
        return 1
    except (OSError, ValueError, NotARecording) as error:
        print(f"lineclear-scheduler replay: {arguments[0]}: {error}", file=sys.stderr)
        return 2
    print(f"{count} calls, every decision the same")
    return 0


def replay(recording: Iterable[Any], on_plan: Callable[[float, StepPlan], None] = lambda now, plan: None) -> int:
    """Replay a recording and return its number of calls. Raises Divergence or NotARecording.

    `on_plan` gets the time and content of each plan, with blank tokens.
    """
    entries = iter(recording)
    header = next(entries, None)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = repr(header["format"])[:60] if isinstance(header, dict) and "format" in header else "another file"
        raise NotARecording(f"its format is {found}, this version replays only {FORMAT!r}")
    core_state = next(entries, None)
    if core_state is None:
        raise NotARecording("it has no records: too many requests were live for a dump of the core")
    replayer, count = _Replayer(load(header["limits"]), core_state, on_plan), 0
    for call, now, facts, keys, outcome in entries:
        count += 1
        answer = to_json_types(replayer.replay(call, now, facts, keys))
        if answer != outcome:
            raise Divergence(f"call {count}, {call} at {now}:\n  recorded {outcome}\n  now      {answer}")
    return count


class _Replayer:
    """A core with recorded facts in place of content. Its private methods are named after recorded calls."""

    def __init__(self, limits: CoreLimits, core_state: Any, on_plan: Callable[[float, StepPlan], None]) -> None:
        self._on_plan = on_plan
        self._keys: deque[bytes] = deque()
        self._donors: deque[list[int] | None] = deque()
        self._core = Scheduler(limits, self._next_key, self._next_donor)
        load_core(self._core, core_state)

    def replay(self, call: str, now: float, facts: list[Any], keys: list[str]) -> Any:
        """Return the core's answer to one recorded call."""
        self._keys = deque(map(bytes.fromhex, keys))
        answer = self._plain(call, now, facts) if call in _PLAIN else getattr(self, f"_{call}")(now, *facts)
        if self._keys:
            raise Divergence(f"{call} at {now} made {len(self._keys)} prefix keys fewer than were recorded")
        return answer

    def _next_key(self, *_: Any) -> bytes:
        if not self._keys:
            raise Divergence("the core makes a prefix key that was not recorded")
        return self._keys.popleft()

    def _next_donor(self, _: Donor | None) -> Donor | None:
        if not self._donors:
            raise Divergence("the core searches a block to copy from where none was recorded")
        recorded = self._donors.popleft()
        return None if recorded is None else Donor(*recorded)

    def _plain(self, call: str, now: float, facts: list[Any]) -> Any:
        """Return the answer to a call whose facts are its arguments."""
        try:
            answer = getattr(self._core, call)(*map(_PLAIN[call], facts), now)
        except LineclearError as error:
            return type(error).__name__
        return answer if isinstance(answer, int) else event_summary(answer or [], int)

    def _submit(self, now: float, number: int, request: Any) -> str:
        try:
            self._core.submit(load_request(request, number), now)
        except LineclearError as error:
            return type(error).__name__
        return "Admitted"

    def _cancel(self, now: float, number: int) -> Any:
        self._core.cancel(str(number), None, now)
        return []  # the shell chose the error

    def _finish(self, now: float, number: int, num_tokens: int) -> Any:
        return event_summary(self._core.finish_at_stop_string(str(number), num_tokens, now), int)

    def _worker_lost(self, now: float, epoch: int, loss: str) -> Any:
        return event_summary(self._core.worker_lost(epoch, now, WorkerLoss[loss]), int)

    def _on_step_error(self, now: float, epoch: int, step: int, kind: int) -> Any:
        return event_summary(self._core.on_step_error(StepError(epoch, step, StepErrorKind(kind)), now), int)

    def _plan(self, now: float, epoch: int, donors: list[list[int] | None]) -> Any:
        self._donors = deque(donors)
        plan = self._core.plan(epoch, now)
        if self._donors:
            raise Divergence(f"plan at {now} searched blocks to copy from {len(self._donors)} times fewer")
        if plan is not None:
            self._on_plan(now, plan)
        return [plan_summary(plan), event_summary(self._core.drain_events(), int)]

    def _apply(
        self,
        now: float,
        epoch: int,
        step: int,
        step_seconds: float,
        bad: list[int],
        void: list[int],
        stops: list[list[int]],
        stuck: list[int],
        counts: list[int],
        num_drafted: list[int],
        draft_seconds: float,
        deferred: Iterable[int] = (),
    ) -> Any:
        last = {str(n): BLANK_EOS if reason == FinishReason.STOP_EOS.value else BLANK_STOP for n, reason in stops}
        tokens: list[int] = []
        for row, request_id in enumerate(self._core.expected_samples(epoch)):
            count = counts[row] if counts else 1
            blank = [BLANK_TOKEN] * (count - 1) + [last.get(request_id, BLANK_TOKEN)]
            tokens += [-1] * count if row in void else blank
        rows = self._core.expected_outputs(epoch)
        scores = tuple(Scores((0.0,) * (row.end - row.start)) for row in rows if row.output is RowOutput.SCORE)
        vectors = tuple(_VECTOR if row.has_vector else b"" for row in rows if row.output is RowOutput.POOL)
        result = StepResult(
            epoch,
            step,
            tuple(tokens),
            bad_rows=frozenset(bad),
            step_seconds=step_seconds,
            counts=tuple(counts),
            scores=scores,
            vectors=vectors,
            stuck_rows=frozenset(stuck),
            num_drafted=tuple(num_drafted),
            draft_seconds=draft_seconds,
            deferred_rows=frozenset(deferred),
        )
        return event_summary(self._core.apply(result, now), int)
