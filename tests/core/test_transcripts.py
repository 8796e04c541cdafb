"""Scripts of commands with the scheduler's answers below each. A change of behaviour is a diff of these files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core.harness import CoreHarness
from support.events import TokensReady

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import Event, Failed, Finished, Preempted, Started
from lineclear.wire.messages import StepError, StepErrorKind, StepPlan

SCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


class Player:
    """Runs the commands of one script and formats the answers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.harness = CoreHarness(**settings)
        self.seen = len(self.harness.events)

    def play(self, command: str, *words: str) -> list[str]:
        """Return the lines of a command's answer."""
        plain = [word for word in words if "=" not in word]
        shown: list[str] = getattr(self, f"_{command}")(*plain, **_settings(words)) or []
        events, self.seen = self.harness.events[self.seen :], len(self.harness.events)
        shown += [line for event in events if (line := _event(event))]
        return shown

    def _submit(self, request_id: str, prompt_len: str, max_tokens: str, **more: Any) -> list[str] | None:
        try:
            self.harness.submit(request_id, int(prompt_len), int(max_tokens), **more)
        except LineclearError as error:
            return [f"refused: {type(error).__name__}: {error}"]
        return None

    def _cancel(self, request_id: str) -> None:
        self.harness.cancel(request_id)

    def _plan(self, times: str = "1") -> list[str]:
        return [line for _ in range(int(times)) for line in _plan(self.harness.plan())]

    def _apply(self) -> None:
        self.harness.apply()

    def _step(self, times: str = "1") -> list[str]:
        return [line for _ in range(int(times)) for line in _plan(self.harness.step())]

    def _finish(self) -> list[str]:
        before = len(self.harness.plans)
        self.harness.run()
        return [f"{len(self.harness.plans) - before} steps"]

    def _at(self, now: str) -> None:
        self.harness.now = float(now)
        self.harness.events += self.harness.core.expire(self.harness.now)

    def _timer(self) -> list[str]:
        return [f"next deadline {self.harness.core.next_deadline()}"]

    def _drain(self) -> None:
        self.harness.core.drain(self.harness.now)

    def _lose(self) -> None:
        self.harness.lose()

    def _join(self, **worker: Any) -> None:
        self.harness.join(**worker)

    def _oom(self) -> None:
        plan = self.harness.flights[0]
        error = StepError(plan.epoch, plan.step, StepErrorKind.OUT_OF_MEMORY)
        self.harness.events += self.harness.core.on_step_error(error, self.harness.now)

    def _state(self) -> list[str]:
        s = self.harness.core.snapshot()
        return [
            f"waiting {s.num_requests_waiting}, running {s.num_requests_running}, in flight {s.steps_in_flight}; "
            f"blocks used {s.blocks_used} of {s.num_blocks}, cached {s.blocks_cached}"
        ]


def _settings(words: tuple[str, ...] | list[str]) -> dict[str, Any]:
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return {name: _value(text) for name, text in pairs}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _plan(plan: StepPlan | None) -> list[str]:
    if plan is None:
        return ["no plan"]
    lines = [f"step {plan.step}" + (f", zero {list(plan.zero_blocks)}" if plan.zero_blocks else "")]
    begun = {init.slot: init for init in plan.inits}
    for row in plan.rows:
        init = begun.get(row.slot)
        parts = [f"  slot {row.slot} [{row.start}, {row.start + row.num_tokens})" + (" sample" if row.sample else "")]
        if init is not None:
            parts.append(f"begins with {len(init.tokens)} tokens")
            if init.blocks:
                parts.append(f"shares {list(init.blocks)}")
        if row.new_blocks:
            parts.append(f"takes {list(row.new_blocks)}")
        lines.append(", ".join(parts))
    return lines


def _event(event: Event) -> str:
    if isinstance(event, TokensReady):
        return f"{event.request_id} token {event.first_index}"
    if isinstance(event, Started):
        return f"{event.request_id} started in slot {event.slot}, {event.cached_tokens} tokens cached"
    if isinstance(event, Preempted):
        return f"{event.request_id} preempted"
    if isinstance(event, Finished):
        r = event.stats
        again = f", {r.recomputed_tokens} recomputed" if r.recomputed_tokens else ""
        return f"{event.request_id} finished: {event.reason.name}, {r.completion_tokens} tokens{again}"
    if isinstance(event, Failed):
        return f"{event.request_id} failed: {type(event.error).__name__}: {event.error}"
    return ""


def replay(text: str) -> str:
    """Return the script with its current answers."""
    player: Player | None = None
    written: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue  # an earlier answer
        written.append(line)
        if not line or line.startswith("#"):
            continue
        command, *words = line.split()
        if command == "scheduler":
            player = Player(_settings(words))
        else:
            assert player is not None, "a script begins with `scheduler` and its settings"
            written += [f"    {answer}" for answer in player.play(command, *words)]
    return "\n".join(written) + "\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_transcript(script: Path, request: pytest.FixtureRequest) -> None:
    text = script.read_text()
    now = replay(text)
    if request.config.getoption("--update-transcripts", default=False):
        script.write_text(now)
    else:
        assert now == text, "to accept: pytest tests/core --update-transcripts"


def test_transcripts_exist() -> None:
    assert len(SCRIPTS) >= 5
    assert all("    step 1" in script.read_text() for script in SCRIPTS)
