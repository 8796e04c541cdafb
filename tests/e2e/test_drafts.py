"""Speculative decoding in the whole service: the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.demo import PROMPTS, SEEDED, greedy, reference
from support.service import DEMO_MODEL, Service, running, wait_for
from support.worker_kills import signal_worker

from lineclear.client import Generation, RepetitionDetection

REPEATS = tuple(f"{prompt} {prompt} {prompt}" for prompt in PROMPTS)
NUM_TOKENS = 48


METHODS = {
    "prompt_lookup": ("--speculative-method", "ngram"),
    "draft_model": ("--speculative-method", "draft_model", "--draft-model", str(DEMO_MODEL.with_name("model-tiny"))),
}


@pytest.fixture(scope="module", params=[(m, d) for m in METHODS for d in "12"], ids=lambda p: f"{p[0]}-depth-{p[1]}")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    method, depth = request.param
    flags = *METHODS[method], "--no-speculative-adaptive", "--pipeline-depth", depth
    with running("--max-batch-size", "4", *flags) as service:
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


def test_log_probabilities_belong_to_their_tokens(service: Service) -> None:
    plain, drafted = (
        generate(service, REPEATS[0], temperature=0.0, top_logprobs=2, num_speculative_tokens=most) for most in (0, 8)
    )
    assert drafted.timings.accepted_tokens > 0
    assert [[top.token_id for top in x.top_logprobs] for x in drafted.logprobs] == [
        [top.token_id for top in x.top_logprobs] for x in plain.logprobs
    ]
    assert [x.logprob for x in drafted.logprobs] == pytest.approx([x.logprob for x in plain.logprobs], abs=1e-3)


def test_answers_survive_killed_workers(service: Service) -> None:
    wanted = [reference(p, NUM_TOKENS) for p in REPEATS]
    for _ in range(3):
        with service.client.stream(REPEATS[0], ignore_eos=True, **greedy(NUM_TOKENS)) as stream:
            next(iter(stream))
            signal_worker(lambda: service.client.stats().worker.pid)
            answers = at_once(service, **greedy(NUM_TOKENS))
            for _ in stream:
                pass
        assert stream.result.token_ids == wanted[0]
        assert [a.token_ids for a in answers] == wanted


COMBINED: dict[str, dict[str, Any]] = {
    "outputs": {"n": 3, **SEEDED},
    "best of": {"best_of": 3, **SEEDED},
    "beams": {"num_beams": 3, "length_penalty": 1.0},
    "prompt log probabilities": {"temperature": 0.0, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "dry_multiplier": 0.8, "no_repeat_ngram_size": 4},
    "stop string": {"temperature": 0.0, "stop": ("a", "b")},
    "ends": {"temperature": 0.7, "seed": 3, "ignore_eos": False, "min_tokens": 12, "max_tokens": 37},
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
