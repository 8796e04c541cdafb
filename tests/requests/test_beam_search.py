"""The beam search against its definition in transformers, and the work of a step at the bounds of a request."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from lineclear.scheduler.requests import beam_search
from lineclear.scheduler.requests.beam_search import Beam, BeamSearch, BeamSettings, EarlyStopping
from lineclear.wire.messages import Logprobs


def step_of(rng: random.Random, vocab_size: int, count: int, digits: int = 9) -> Logprobs:
    """Return the most likely tokens of a random row; with few `digits` many are equally likely."""
    row = sorted(((token, round(-rng.random() * 9, digits)) for token in range(vocab_size)), key=lambda x: -x[1])
    return Logprobs(row[0][1], tuple(row[:count]))


def single(value: float) -> float:
    return array("f", [value])[0]


class Definition:
    """The search as transformers defines it: sort all candidates, then look at those that count."""

    def __init__(self, settings: BeamSettings) -> None:
        self.settings = settings
        self.running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self.finished: list[tuple[tuple[int, ...], float]] = []
        self.is_done = False

    def advance(self, steps: list[Logprobs]) -> None:
        settings, length = self.settings, len(self.running[0][0]) + 1
        barred = settings.end_ids if length <= settings.min_tokens else frozenset[int]()
        found = [
            ((*tokens, token), single(score + logprob))
            for (tokens, score), step in zip(self.running, steps, strict=True)
            for token, logprob in step.top
            if token not in barred
        ]
        found.sort(key=lambda entry: entry[1], reverse=True)
        found = found[: max(2, 1 + len(settings.end_ids)) * settings.num_beams]
        is_last = length >= settings.max_tokens
        ends = [is_last or tokens[-1] in settings.end_ids for tokens, _ in found]
        divisor = single(float(length) ** settings.length_penalty)
        for (tokens, score), is_end in list(zip(found, ends, strict=True))[: settings.num_beams]:
            if is_end:
                self.finished.append((tokens, single(score / divisor)))
        self.finished = sorted(self.finished, key=lambda entry: entry[1], reverse=True)[: settings.num_beams]
        self.running = [entry for entry, is_end in zip(found, ends, strict=True) if not is_end][: settings.num_beams]
        self.is_done = not self.running or self._is_over(length)

    def _is_over(self, length: int) -> bool:
        settings = self.settings
        if len(self.finished) < settings.num_beams:
            return False
        if settings.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        if settings.early_stopping is EarlyStopping.NEVER and settings.length_penalty > 0:
            length = settings.max_tokens
        return single(self.running[0][1] / single(length**settings.length_penalty)) <= self.finished[-1][1]


@pytest.mark.parametrize("seed", range(300))
def test_search_equals_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice((9, 30, 80))
    num_beams, num_ends = rng.randint(2, 6), rng.choice((0, 1, 2, 6))
    settings = BeamSettings(
        num_beams,
        max_tokens=rng.choice((1, 4, 12)),
        end_ids=frozenset(rng.sample(range(vocab_size), num_ends)),
        length_penalty=rng.choice((1.0, 0.0, -1.0, 0.6, 2.0)),
        early_stopping=rng.choice(list(EarlyStopping)),
        min_tokens=rng.choice((0, 0, 3)),
    )
    digits = rng.choice((1, 9))
    search, right = BeamSearch(settings), Definition(settings)
    while not right.is_done:
        steps = [step_of(rng, vocab_size, vocab_size, digits) for _ in right.running]
        search.advance([Logprobs(step.logprob, step.top[: settings.num_top]) for step in steps])
        right.advance(steps)
        assert [(beam.tokens, beam.score) for beam in search.running] == right.running
        assert [(beam.tokens, beam.score) for beam in search.finished] == right.finished
    assert search.is_done


def test_a_step_at_the_bounds_makes_two_beams_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def beam(*args: Any) -> Beam:
        nonlocal made
        made += 1
        return Beam(*args)

    settings = BeamSettings(32, 100, frozenset(range(32)), early_stopping=EarlyStopping.NEVER)
    search, rng = BeamSearch(settings, num_shown=20), random.Random(1)
    search.advance([step_of(rng, 200, settings.num_top)])
    monkeypatch.setattr(beam_search, "Beam", beam)
    for length in range(2, 12):
        made = 0
        search.advance([step_of(rng, 200, settings.num_top) for _ in search.running])
        assert len(search.running) == 32
        assert made <= 64, f"{made} copies of {length} tokens"
    assert settings.num_top == 64, "the worker sends as many log probabilities of each beam"


def test_a_step_at_the_bounds_reads_few_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the end ids are the most likely tokens of all beams."""
    read = 0

    class Counted(tuple[tuple[int, float], ...]):
        def __iter__(self) -> Any:
            nonlocal read
            for entry in super().__iter__():
                read += 1
                yield entry

    settings = BeamSettings(32, 100, frozenset(range(32)), early_stopping=EarlyStopping.NEVER)
    search, rng = BeamSearch(settings), random.Random(1)
    search.advance([step_of(rng, 200, settings.num_top)])
    ends = [(token, -0.001 * token) for token in range(32)]
    for _ in range(5):
        steps = [step_of(rng, 200, 200).top for _ in search.running]
        tops = [[*ends, *(entry for entry in top if entry[0] >= 32)][: settings.num_top] for top in steps]
        read = 0
        search.advance([Logprobs(0.0, Counted(top)) for top in tops])
        assert len(search.running) == 32
        assert read <= 2 * 32 + 32 * 32 + 2 * 32, read


def test_log_probabilities_are_those_of_the_path() -> None:
    search, rng = BeamSearch(BeamSettings(3, 20, frozenset({1})), num_shown=2), random.Random(5)
    right: dict[tuple[int, ...], list[Logprobs]] = {(): []}
    while not search.is_done:
        steps = [step_of(rng, 30, 4) for _ in search.running]
        for beam, step in zip(search.running, steps, strict=True):
            for token, logprob in step.top:
                right[(*beam.tokens, token)] = [*right[beam.tokens], Logprobs(logprob, step.top[:2])]
        search.advance(steps)
        assert all(beam.logprobs == right[beam.tokens] for beam in (*search.running, *search.finished))
    assert len(search.finished[0].logprobs) == len(search.finished[0].tokens)


def test_no_log_probabilities_are_kept_unless_shown() -> None:
    search, rng = BeamSearch(BeamSettings(3, 20, frozenset({1}))), random.Random(5)
    for _ in range(5):
        search.advance([step_of(rng, 30, 4) for _ in search.running])
    assert all(beam.parent is None and beam.logprobs == [] for beam in search.running)


@pytest.mark.parametrize("length", [9_999, 59_999])
@pytest.mark.parametrize("penalty", [10.0, -10.0])
@pytest.mark.parametrize("stopping", EarlyStopping)
def test_powers_outside_of_single_precision_end_no_search(penalty: float, length: int, stopping: EarlyStopping) -> None:
    """10,000 ** 10 is more than single precision holds, and 60,000 ** -10 is 0 there."""
    search = BeamSearch(BeamSettings(2, 60_000, frozenset({0}), penalty, stopping))
    search.running = [Beam(tuple(range(1, length + 1)), -1.0), Beam(tuple(range(2, length + 2)), -2.0)]
    search.advance([Logprobs(-0.5, ((0, -0.5), (5, -1.0), (6, -1.5))) for _ in search.running])
    assert search.finished
