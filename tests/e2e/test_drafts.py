"""Speculative decoding in the whole service: the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.demo import PROMPTS, SEEDED, greedy, reference
from support.service import DEMO_MODEL, Service, running, wait_for
from support.worker_kills import answers_over_a_kill

from lineclear.client import Generation, RepetitionDetection

REPEATS = tuple(f"{prompt} {prompt} {prompt}" for prompt in PROMPTS[:5])
NUM_TOKENS = 32
METHODS = {
    "prompt_lookup": ("--speculative-method", "ngram", "--pipeline-depth", "1"),
    "draft_model": ("--speculative-method", "draft_model", "--draft-model", str(DEMO_MODEL.with_name("model-tiny"))),
}


@pytest.fixture(scope="module", params=["draft_model", pytest.param("prompt_lookup", marks=pytest.mark.exhaustive)])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Run a server for each method, one of them with one step in flight. test_forms_everywhere.py looks prompts up."""
    with running("--max-batch-size", "4", "--no-speculative-adaptive", *METHODS[request.param]) as service:
        yield service
        wait_for(service.is_idle, "idle at the end")


def generate(service: Service, prompt: str, **parameters: Any) -> Generation:
    return service.client.generate(prompt, **{"ignore_eos": True, "max_tokens": NUM_TOKENS} | parameters)


def at_once(service: Service, **parameters: Any) -> list[Generation]:
    with ThreadPoolExecutor(len(REPEATS)) as pool:
        return list(pool.map(lambda prompt: generate(service, prompt, **parameters), REPEATS))


def test_greedy_answers_equal_generate(service: Service) -> None:
    answers = at_once(service, **greedy(NUM_TOKENS))
    assert [a.token_ids for a in answers] == [reference(p, NUM_TOKENS) for p in REPEATS]
    accepted = sum(a.timings.accepted_tokens for a in answers)
    assert 0 < accepted < sum(a.timings.drafted_tokens for a in answers)
    counters = service.client.stats().counters
    assert counters.spec_decode_num_accepted_tokens >= accepted


def test_sampled_answers_are_those_of_plain_decoding(service: Service) -> None:
    plain = at_once(service, num_speculative_tokens=0, **SEEDED)
    drafted = at_once(service, **SEEDED)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    assert [a.text for a in drafted] == [a.text for a in plain]
    assert all(a.timings.drafted_tokens == 0 for a in plain)
    assert any(a.timings.drafted_tokens > 0 for a in drafted)


def test_answers_survive_killed_workers(service: Service) -> None:
    requests = [(prompt, greedy(NUM_TOKENS)) for prompt in REPEATS]
    answers = answers_over_a_kill(service, requests)
    assert [answer.token_ids for answer in answers] == [reference(prompt, NUM_TOKENS) for prompt in REPEATS]


COMBINED: dict[str, dict[str, Any]] = {
    "outputs": {"n": 3, **SEEDED},
    "best of": {"best_of": 3, **SEEDED},
    "beams": {"num_beams": 3, "length_penalty": 1.0},
    "prompt log probabilities": {"temperature": 0.0, "prompt_logprobs": 1},
    "stop string": {"temperature": 0.0, "stop": ("a", "b")},
    "repetition": {"temperature": 0.0, "repetition_detection": RepetitionDetection(max_pattern_size=8, min_count=3)},
}


@pytest.mark.parametrize("name", COMBINED)
def test_answer_with_other_features_is_that_of_plain_decoding(
    service: Service, request: pytest.FixtureRequest, name: str
) -> None:
    plain, drafted = (generate(service, REPEATS[3], num_speculative_tokens=most, **COMBINED[name]) for most in (0, 8))
    assert [(x.token_ids, x.text, x.finish_reason) for x in (drafted, *drafted.outputs)] == [
        (x.token_ids, x.text, x.finish_reason) for x in (plain, *plain.outputs)
    ]
    # Each token of a beam is a request of its own, and not every answer repeats its prompt.
    if "num_beams" not in COMBINED[name] and "draft_model" in request.node.name:
        assert drafted.timings.drafted_tokens > 0
