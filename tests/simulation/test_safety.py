"""Under faults that never stop, nothing wrong is ever said or planned. Even seeds; odd ones: test_liveness."""

from __future__ import annotations

from simulation.sweep import regressions, sweep


def test_invariants_hold_under_faults(seeds: range) -> None:
    sweep(seed for seed in seeds if seed % 2 == 0)


def test_histories_have_every_kind_of_event() -> None:
    # A simulation in which little happens proves little.
    happened = sweep(range(0, 200, 2))
    for kind in ("Started", "TokensReady", "Finished", "Failed", "Preempted", "WorkerLost", "BadResult", "QueueFull"):
        assert happened[kind] > 0, kind
    assert happened["Finished"] > 200
    assert happened["PoisonRequest"] > 10
    assert happened["oom"] + happened["oov"] + happened["crash"] + happened["replace"] > 30


def test_regressions() -> None:
    sweep(regressions())
