"""Short runs of the campaigns with the tiny demo model, whose requests combine features."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import chaos
from support.service import DEMO_MODEL


def run(folder: Path, how: str, recovers: frozenset[str], **options: int | float | str) -> chaos.Campaign:
    """Run a campaign with a kill of the worker or of a rank, and more until each of these features is recovered."""
    options |= {"of": "worker", "kills": 1, "model": str(DEMO_MODEL.with_name("model-tiny")), "seed": 6}
    done = chaos.campaign(folder, **options, deaths={how: 1.0}, recovers=recovers)
    assert done.tally.is_clean, done.figures()
    assert not done.orphans
    assert done.tally.recovered.keys() >= recovers
    assert done.how[how] >= 1
    return done


MIXED = frozenset({"adapter", "constraint", "outputs"})
SIZES = {"streams": 18, "num_questions": 10, "max_seconds": 60.0}


@pytest.mark.exhaustive
def test_clients_with_mixed_features_notice_no_kill(folder: Path) -> None:
    run(folder, "kill", MIXED, **SIZES)


def test_deterministic_answers_are_bitwise_those_of_a_quiet_server(folder: Path) -> None:
    """In bfloat16, where the batch changes the last bits, and tokens, without the setting."""
    flags = {"server_flags": "--target-batch-tokens 48", "worker_flags": "--dtype bfloat16 --deterministic"}
    done = run(folder, "kill", frozenset(), streams=12, num_questions=12, answers=24, **flags)
    assert done.tolerance == 0.0
    assert done.tally.recovered
    assert done.tally.answers >= 24


def test_clients_with_mixed_features_notice_no_kill_of_a_rank(folder: Path) -> None:
    """The expected answers are those of an undisturbed worker of as many ranks."""
    done = run(folder, "rank", MIXED, **SIZES, tensor_parallel_size=2)
    assert done.tally.accepted_tokens
