"""A sample of each campaign, so that they run when they are needed, and would say if something were lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import chaos, privacy, soak
from campaigns.answers import Question
from support.world import short_directory


@pytest.fixture
def folder() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(("of", "kills"), [("worker", 4), ("scheduler", 2)])
def test_nobody_notices(folder: Path, of: str, kills: int) -> None:
    done = chaos.campaign(folder, of=of, kills=kills, streams=8, seed=3)
    assert done.is_clean, done.figures()
    assert done.tally.answers >= 8
    assert len(done.recovered) == kills
    assert (done.tally.resumes > 0) == (of == "scheduler")


def test_a_wrong_token_would_be_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = chaos.toy_questions

    def questions(seed: int) -> object:
        ask = real(seed)

        def wrong() -> Question:
            question = ask()
            return Question(question.prompt, question.sampling, (*question.right[:-1], question.right[-1] ^ 1))

        return wrong

    monkeypatch.setattr(chaos, "toy_questions", questions)
    done = chaos.campaign(folder, of="worker", kills=0, streams=2, seed=3)
    assert not done.is_clean
    assert done.tally.altered == done.tally.answers


def test_a_short_soak_counts_and_holds_nothing(folder: Path) -> None:
    found = soak.soak(folder, seconds=4.0, streams=4, seed=5)
    assert found["answers"] > 10
    assert (found["wrong"], found["held_at_end"]) == (0, 0)
    assert found["scheduler"]["first_bytes"] > 10 * 2**20


def test_a_leak_has_a_slope_and_noise_has_none() -> None:
    dice = random.Random(1)
    leak = [(n * 100.0, n * 100.0 * 40 + dice.uniform(-1e6, 1e6)) for n in range(500)]
    rise, error = soak.slope(leak)
    assert rise - error < 40 < rise + error
    assert 100_000 * (rise - error) > 2**20
    noise = [(n * 1000.0, dice.uniform(-1e5, 1e5)) for n in range(500)]
    rise, error = soak.slope(noise)
    assert 100_000 * (rise + error) < 2**20


def test_a_cached_prompt_is_seen_by_its_own_tenant(folder: Path) -> None:
    """The clock works. What the other tenant must not see takes hundreds of trials and a quiet machine; CI counts the
    work instead: service/test_privacy.py."""
    figures = privacy.campaign(folder, trials=16, seed=2)
    assert figures["median_ms"]["own"] < figures["median_ms"]["never"], figures
    assert figures["trials"]["never"] + figures["trials"]["others"] == figures["trials"]["own"] == 16


def test_the_area_is_the_chance_of_a_right_guess() -> None:
    assert privacy.area([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert privacy.area([1.0, 3.0], [2.0, 3.0]) == 0.625
    assert privacy.separability([3.0, 4.0], [1.0, 2.0]) == 1.0
    dice = random.Random(4)
    same = [[dice.gauss(5, 1) for _ in range(400)] for _ in range(2)]
    assert privacy.separability(*same) <= privacy.MOST_AREA
    assert privacy.separability(same[0], [value + 0.5 for value in same[1]]) > privacy.MOST_AREA


def test_quantiles_are_those_of_the_values() -> None:
    assert chaos._quantiles([float(n) for n in range(1, 101)]) == {"p50": 51.0, "p99": 100.0, "max": 100.0}
    assert chaos._quantiles([]) == {}
