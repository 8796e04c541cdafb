"""`lineclear-scheduler replay FILE`: runs the core again over a flight recording and compares every decision.

A core made from the recording's checkpoint is told what the recorded one was told. The first call it answers otherwise
is printed, with both answers.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.flight_recorder.core_state import (
    EOS,
    NORMAL,
    STOP,
    blank_request,
    hello_from,
    load_core,
    to_json_types,
)
from lineclear.scheduler.flight_recorder.recorder import FORMAT, event_summary, plan_summary
from lineclear.wire.messages import StepError, StepErrorKind, StepResult


class NotARecording(Exception):
    """The file cannot be replayed."""


class Divergence(Exception):
    """The core decides otherwise than it did."""


def main(arguments: list[str]) -> int:
    """Replay the file that `arguments` name. 0: all decisions are the same, 1: one is not, 2: not a recording."""
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


def replay(recording: Iterable[Any]) -> int:
    """Run a recording; how many calls it has. Raises Divergence, or NoRecording for what is none."""
    entries = iter(recording)
    header = next(entries, None)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise NotARecording(f"it does not begin as a {FORMAT!r} does")
    checkpoint = next(entries, None)
    if checkpoint is None:
        raise NotARecording("it is empty: too many requests lived for a checkpoint")
    player, count = _Replayer(load_core(checkpoint)), 0
    for call, now, facts, keys, outcome in entries:
        count += 1
        answer = to_json_types(player.play(call, now, facts, keys))
        if answer != outcome:
            raise Divergence(f"call {count}, {call} at {now}:\n  recorded {outcome}\n  now      {answer}")
    return count


class _Replayer:
    """A core, and what it has to be told instead of content."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._keys: deque[bytes] = deque()
        core._batch.new_key = self._next_key  # type: ignore[assignment, method-assign]

    def play(self, call: str, now: float, facts: list[Any], keys: list[str]) -> Any:
        """The core's answer to one recorded call."""
        self._keys = deque(map(bytes.fromhex, keys))
        answer = getattr(self, f"_{call}")(now, *facts)
        if self._keys:
            raise Divergence(f"{call} at {now} made {len(self._keys)} prefix keys fewer than were recorded")
        return answer

    def _next_key(self, *_: Any) -> bytes:
        if not self._keys:
            raise Divergence("the core makes a prefix key that it did not make")
        return self._keys.popleft()

    def _submit(self, now: float, *request: Any) -> str:
        try:
            self._core.submit(blank_request(*request), now)
        except LineclearError as error:
            return type(error).__name__
        return "Admitted"

    def _cancel(self, now: float, number: int) -> Any:
        self._core.cancel(str(number), None, now)
        return []  # with what error is the shell's affair

    def _finish(self, now: float, number: int, num_tokens: int) -> Any:
        return event_summary(self._core.finish(str(number), num_tokens, now), int)

    def _expire(self, now: float) -> Any:
        return event_summary(self._core.expire(now), int)

    def _drain(self, now: float) -> Any:
        self._core.drain(now)
        return []

    def _forget(self, now: float) -> Any:
        self._core.clear_prefix_cache()
        return []

    def _reset(self, now: float, hello: dict[str, Any] | None, loss: str) -> Any:
        return event_summary(
            self._core.on_worker_change(None if hello is None else hello_from(hello), now, WorkerLoss[loss]), int
        )

    def _fail_step(self, now: float, epoch: int, step: int, kind: int) -> Any:
        return event_summary(self._core.on_step_error(StepError(epoch, step, StepErrorKind(kind)), now), int)

    def _plan(self, now: float) -> Any:
        plan = self._core.plan(now)
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
    ) -> Any:
        ends = {number: EOS if reason == FinishReason.STOP_EOS.value else STOP for number, reason in stops}
        flight = self._core._inflight[0]
        tokens = [ends.get(sequence.queue_key[1], NORMAL) for sequence in flight.sampled()]
        for row in void:
            tokens[row] = -1
        result = StepResult(epoch, step, tuple(tokens), (), frozenset(bad), step_seconds)
        return event_summary(self._core.apply(result, now), int)
