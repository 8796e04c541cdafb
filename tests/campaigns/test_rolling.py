"""A short run of the campaign of rolling updates, and a check that it detects an answer of two models."""

from __future__ import annotations

from pathlib import Path

from campaigns import rolling


def test_answers_are_of_one_model(folder: Path) -> None:
    done = rolling.campaign(folder, updates=2, streams=6, seed=3)
    assert done.is_clean, done.figures()
    assert len(done.tally.models) >= 2
    assert done.tally.changed > 0
    assert done.tally.restarts > 0


def test_answer_of_two_models_is_found() -> None:
    prompt, sampling = (5, 6), rolling.Sampling(seed=1)
    one, other = (rolling.expected(prompt, sampling, 20, 512, model) for model in ("m0", "m1"))
    mixed = [*one[:10], *other[10:]]
    assert rolling.is_prefix(rolling.Part("toym0", one[:10], rolling.text_of(one[:9]).rstrip("\ufffd")), one)
    assert not rolling.is_prefix(rolling.Part("toym0", mixed, ""), one)
    assert not rolling.is_prefix(rolling.Part("toym0", one, rolling.text_of(mixed)), one)
