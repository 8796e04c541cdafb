"""Under faults that never stop, every invariant holds. Even seeds; odd ones: test_liveness."""

from __future__ import annotations

from simulation.sweep import regressions, sweep

FIRST = range(0, 200, 2)


def test_invariants_hold_under_faults(seeds: range) -> None:
    sweep(seed for seed in seeds if seed % 2 == 0 and seed not in FIRST)


def test_histories_have_every_kind_of_event() -> None:
    # A simulation without some kind of event would not test it.
    counts = sweep(FIRST)
    for kind in (
        "Started",
        "TokensReady",
        "Finished",
        "Failed",
        "Preempted",
        "WorkerLost",
        "BadResult",
        "QueueFull",
        "switch",
    ):
        assert counts[kind] > 0, kind
    assert counts["Finished"] > 200
    assert counts["PoisonRequest"] > 10
    assert counts["step_error"] + counts["bad_token"] + counts["crash"] + counts["replace"] > 30


def test_regressions() -> None:
    sweep(regressions())
