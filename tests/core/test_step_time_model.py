"""The step time model fits a machine, follows its changes, and stays finite."""

from __future__ import annotations

import math
import random

import pytest

from lineclear.scheduler.core.step_time_model import StepTimeModel


def machine(tokens: float, kv_tokens: float) -> float:
    return 0.005 + 1e-4 * tokens + 2e-7 * kv_tokens


def teach(model: StepTimeModel, rng: random.Random, steps: int, *, noise: float = 0.0, slow: float = 1.0) -> None:
    for _ in range(steps):
        tokens, kv_tokens = rng.choice((1, 8, 32, 64, 256)), rng.randint(1, 60_000)
        model.observe(tokens, kv_tokens, slow * machine(tokens, kv_tokens) * (1 + rng.uniform(-noise, noise)))


def worst_error(model: StepTimeModel, slow: float = 1.0) -> float:
    points = [(tokens, kv_tokens) for tokens in (1, 64, 512) for kv_tokens in (100, 20_000, 60_000)]
    return max(abs(model.predict(*p) / (slow * machine(*p)) - 1) for p in points)


def test_fits_the_three_coefficients() -> None:
    model = StepTimeModel()
    teach(model, random.Random(1), 100)
    assert model.coefficients == pytest.approx((0.005, 1e-4, 2e-7), rel=0.01)
    assert model.tokens_within(0.025, 0) == pytest.approx(200, rel=0.01)


def test_deep_tokens_take_longer() -> None:
    model = StepTimeModel()
    teach(model, random.Random(1), 100)
    # 25 ms less 5 ms for the step, 1 ms for ten tokens and 2 ms for their context: 17 ms at 0.1 or 0.5 ms a token.
    # The tokens attend to each other too: 0.1 us a token for each before it.
    for context, count in ((0, 147.5), (2000, 33.4)):
        found = model.chunk_within(0.025, 10, 10_000, 0, context)
        assert found == pytest.approx(count, rel=0.02)
        kv_tokens = 10_000 + found * context + found * found / 2
        assert model.predict(10 + found, kv_tokens) == pytest.approx(0.025, rel=0.001)


def test_scored_positions_take_longer() -> None:
    model, rng = StepTimeModel(), random.Random(1)
    teach(model, rng, 100)
    for _ in range(50):
        tokens, scored = rng.randint(10, 60), rng.randint(1, 10)
        model.observe(tokens, 5_000, machine(tokens, 5_000) + 3e-4 * scored, scored)
    assert model.seconds_per_scored == pytest.approx(3e-4, rel=0.05)
    assert model.coefficients == pytest.approx((0.005, 1e-4, 2e-7), rel=0.05)
    plain, scored = (model.chunk_within(0.01, 10, 0, 0, 0, is_scored=kind) for kind in (False, True))
    assert plain == pytest.approx(4 * scored, rel=0.1)


def test_model_is_trusted_to_twice_what_was_measured() -> None:
    model = StepTimeModel()
    for tokens in (1, 2, 3, 4, 5, 6, 7):
        model.observe(tokens, 0, machine(tokens, 0))
        assert model.chunk_within(60.0, 1, 0, 0, 0) == 0, "too few observations"
        assert model.tokens_within(1.0, 0) is None
    model.observe(8, 0, machine(8, 0))
    assert model.tokens_within(1.0, 0) is not None
    assert model.chunk_within(60.0, 1, 0, 0, 0) == 2 * 8 - 1
    assert model.chunk_within(60.0, 17, 0, 0, 0) == 0, "the step is larger than that already"
    assert model.chunk_within(60.0, 1, 0, 0, 0, is_scored=True) == 0, "no score was measured"
    model.observe(4, 0, machine(4, 0), 3)
    assert model.chunk_within(60.0, 1, 0, 0, 0, is_scored=True) == 2 * 3


def test_error_factor_follows_the_noise() -> None:
    quiet, noisy = StepTimeModel(), StepTimeModel()
    teach(quiet, random.Random(1), 500)
    teach(noisy, random.Random(1), 500, noise=0.1)
    assert quiet.error_factor == pytest.approx(1.0, abs=0.01)
    assert noisy.error_factor == pytest.approx(1.15, abs=0.05)  # three times the mean of 0 to 0.1
    noisy.observe(8, 8000, 1e6)
    assert noisy.error_factor < 1.4, "a pause of the machine counts at most as long as the step"


def test_tolerates_noise() -> None:
    model = StepTimeModel()
    teach(model, random.Random(1), 1000, noise=0.1)
    assert worst_error(model) < 0.05


def test_follows_a_slower_machine() -> None:
    model = StepTimeModel()
    teach(model, random.Random(1), 1000)
    teach(model, random.Random(2), 1000, slow=3.0)
    assert worst_error(model, slow=3.0) < 0.02


@pytest.mark.parametrize("steps", [1_000, 160_000])
def test_identical_steps_do_not_degrade_the_model(steps: int) -> None:
    # Forgetting on identical steps grows the covariance by 1.005 a step: to infinity after 150,000 steps.
    model, rng = StepTimeModel(), random.Random(1)
    teach(model, rng, 300, noise=0.05)
    for _ in range(steps):
        model.observe(8, 8000, machine(8, 8000) * (1 + rng.uniform(-0.05, 0.05)))
    assert all(math.isfinite(c) for c in model.coefficients)
    assert model.predict(8, 8000) == pytest.approx(machine(8, 8000), rel=0.05)
    teach(model, rng, 300, noise=0.05)
    assert worst_error(model) < 0.1


def test_steps_of_zero_seconds_give_no_estimate() -> None:
    model = StepTimeModel()
    for _ in range(100):
        model.observe(8, 100, 0.0)
    assert model.coefficients == (0.0, 0.0, 0.0)
    assert model.tokens_within(0.1, 0) is None


def test_very_fast_machine_gives_finite_token_count() -> None:
    # The caller converts the result to an integer, which fails for infinity.
    model = StepTimeModel()
    for tokens in range(1, 20):
        model.observe(tokens, 0, tokens * 5e-324)
    fitting = model.tokens_within(60.0, 0)
    assert fitting is None or math.isfinite(fitting)
