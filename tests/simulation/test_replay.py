"""The flight recording of every simulated history replays, from any start."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
import simulation.checked_scheduler
from simulation.scenario_draw import draw
from simulation.simulated_run import SimulatedRun
from simulation.sweep import NUM_SEEDS, pieces, regressions

from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.dump import dump_core, load, load_core
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.flight_recorder.recorder import RecordingScheduler, to_json_types
from lineclear.scheduler.flight_recorder.replay import replay


def record(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    max_records = random.Random(seed).choice((5, 40, 300, 10_000))

    def make(limits: CoreLimits) -> RecordingScheduler:
        return RecordingScheduler(limits, max_records)

    monkeypatch.setattr(simulation.checked_scheduler, "Scheduler", make)
    run = SimulatedRun(draw(seed), checked=False)
    run.run()
    assert isinstance(run.scheduler.core, RecordingScheduler)
    return [json.dumps(entry) for entry in run.scheduler.core.recording()]


@pytest.mark.parametrize("histories", [*pieces(NUM_SEEDS), [*regressions(), 329]])
def test_history_replays(histories: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In history 329, accepted drafts behind the end of an answer, which a recording lacks, once gave credit."""
    calls = 0
    for seed in histories:
        try:
            lines = record(seed, monkeypatch)
            calls += replay(map(json.loads, lines))
            check_loaded_core(lines)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert calls > 1000


def check_loaded_core(lines: list[str]) -> None:
    """Check that a core in the state of a recording has exactly this state."""
    header, core_state = map(json.loads, lines[:2])
    core = Scheduler(load(header["limits"]), lambda *_: b"", lambda found: found)
    load_core(core, core_state)
    assert json.dumps(to_json_types(dump_core(core))) == lines[1]
    invariants.check(core)
