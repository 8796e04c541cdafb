"""Sampling and beam search over real processes: the same answers under preemption, kills and resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from support.demo import PROMPTS, greedy, model, reference
from support.service import Service, running, wait_for
from support.worker_kills import answers_over_a_kill

from lineclear.client import Request
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

LENGTH = 32
ASKED = PROMPTS[:3]
MIXED: tuple[dict[str, Any], ...] = (
    {"no_repeat_ngram_size": 2, "temperature": 0.0},
    {"bad_words": ["the", "of the", " and"], "no_repeat_ngram_size": 3, "temperature": 1.0, "seed": 5},
    {"begin_banned_token_ids": list(range(200)), "exponential_decay_factor": 1.02, "temperature": 0.7, "seed": 6},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["."], "temperature": 0.0},
    {"typical_p": 0.6, "top_n_sigma": 2.0, "dynatemp_range": 0.4, "temperature": 1.0, "seed": 7},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "dry_multiplier": 0.8, "temperature": 0.9, "seed": 8},
    {"forced_first_token_id": 77, "no_repeat_ngram_size": 4, "temperature": 0.0},
    {"frequency_penalty": 2.0, "repetition_penalty": 1.1, "min_tokens": 20, "temperature": 0.0},
)
"""Parameters that depend on the tokens before; each kind of parameter of docs/sampling.md is in one of them."""
CASES = [(prompt, {"max_tokens": LENGTH, **params}) for prompt in ASKED for params in MIXED]
"""The first eight, which run at the same time, have all parameters."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Run the demo model with too few blocks for eight answers."""
    with running("--max-batch-size", "8", worker=("--num-blocks", "44", "--block-size", "4")) as service:
        yield service
        wait_for(service.is_idle, "idle at the end")


@pytest.fixture(scope="module")
def wanted(service: Service) -> list[tuple[int, ...]]:
    found = [service.client.generate(prompt, ignore_eos=True, **params).token_ids for prompt, params in CASES]
    plain = [reference(prompt, LENGTH) for prompt in ASKED]
    for number, params in enumerate(MIXED):
        assert found[number :: len(MIXED)] != plain, f"{params} has no effect"
    return found


def test_batch_mates_and_preemption_change_no_token(service: Service, wanted: list[tuple[int, ...]]) -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        found = pool.map(lambda case: service.client.generate(case[0], ignore_eos=True, **case[1]), CASES)
        assert [answer.token_ids for answer in found] == wanted
    assert service.client.stats().counters.preemptions > 0


def test_killed_worker_changes_no_token(service: Service, wanted: list[tuple[int, ...]]) -> None:
    """Beside greedy answers that equal transformers' ones."""
    plain = [(prompt, greedy(LENGTH)) for prompt in PROMPTS]
    found = [answer.token_ids for answer in answers_over_a_kill(service, [*CASES, *plain])]
    assert found == [*wanted, *(reference(prompt, LENGTH) for prompt in PROMPTS)]


@pytest.mark.parametrize("cut", [1, 20, LENGTH - 1])
def test_resume_changes_no_token(service: Service, wanted: list[tuple[int, ...]], cut: int) -> None:
    """A resumed answer continues with the tokens that the first server would have sent."""
    for (prompt, params), whole in list(zip(CASES, wanted, strict=True))[: len(MIXED)]:
        request = Request.of(prompt, ignore_eos=True, **params).to_proto()
        assert _resumed(service, request, whole[:cut]) == whole[cut:]


def _resumed(service: Service, message: pb.GenerateRequest, received: tuple[int, ...]) -> tuple[int, ...]:
    fingerprint = service.client.model().model_fingerprint
    message.resume.CopyFrom(pb.Resume(token_ids=received, model_fingerprint=fingerprint))
    with grpc.insecure_channel(service.target) as channel:
        responses = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(message))
    return tuple(token_id for response in responses for token_id in response.token_ids)


def beam_cases() -> list[tuple[list[int], dict[str, Any], list[int]]]:
    rng = random.Random(11)
    found = []
    for number in range(21):
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(1, 24))]
        num_beams = rng.choice((2, 3, 4, 4, 6))
        params = {
            "num_beams": num_beams,
            "num_return_sequences": rng.randint(1, num_beams),
            "length_penalty": rng.choice((1.0, 0.0, -1.0, 0.6, 2.0)),
            "early_stopping": rng.choice((False, True, "never")),
            "max_new_tokens": rng.choice((4, 12, 20)),
        }
        if number % 4 == 0:
            params["min_new_tokens"] = 3
        found.append((prompt, params, [rng.randrange(10, 4000) for _ in range(rng.choice((0, 2, 14)))]))
    return found


def beams_of_transformers(
    prompt: list[int], params: dict[str, Any], ends: list[int]
) -> tuple[list[list[int]], list[float]]:
    """Return the outputs of transformers without padding, and their scores."""
    with torch.inference_mode():
        out = model()[0].generate(
            torch.tensor([prompt]), do_sample=False, eos_token_id=ends, pad_token_id=ends[0],
            return_dict_in_generate=True, output_scores=True, **params,
        )  # fmt: skip
    tokens = []
    for row in out.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        tokens.append(row[: end + 1])
    return tokens, out.sequences_scores.tolist()


def likely_ends(prompt: list[int]) -> list[int]:
    """Return two tokens of a greedy answer, so that beams end early."""
    with torch.inference_mode():
        row = model()[0].generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, min_new_tokens=8)[0]
    return [int(row[-1]), int(row[-4])]


def test_beams_equal_transformers(service: Service) -> None:
    requests = [(prompt, params, sorted({*likely_ends(prompt), *ends})) for prompt, params, ends in beam_cases()]

    def ask(case: tuple[list[int], dict[str, Any], list[int]]) -> Any:
        prompt, params, ends = case
        return service.client.generate(
            prompt, n=params["num_return_sequences"], num_beams=params["num_beams"], eos_token_ids=ends,
            length_penalty=params["length_penalty"], early_stopping=params["early_stopping"],
            max_tokens=params["max_new_tokens"], min_tokens=params.get("min_new_tokens"),
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, requests))
    num_ended = 0
    for case, answer in zip(requests, answers, strict=True):
        tokens, scores = beams_of_transformers(*case)
        assert [list(output.token_ids) for output in answer.outputs] == tokens, case
        assert [output.score for output in answer.outputs] == pytest.approx(scores, rel=1e-4, abs=1e-4)
        num_ended += sum(output.finish_reason == "stop_eos" for output in answer.outputs)
    assert num_ended > 5, "few beams ended with an end-of-sequence token"
    assert any(output.finish_reason == "length" for answer in answers for output in answer.outputs)


def test_outputs_equal_single_requests_on_the_model(service: Service) -> None:
    prompt = list(range(20, 80))
    params: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95}
    before = service.client.stats().counters.step_tokens
    together = service.client.generate(prompt, n=4, seed=41, **params)
    wait_for(service.is_idle, "idle")
    computed = service.client.stats().counters.step_tokens - before
    assert computed <= len(prompt) + 4 * 16 + 4 * 3, "outputs compute the prompt once, and each the rest of its block"
    alone = [service.client.generate(prompt, seed=41 + index, **params).token_ids for index in range(4)]
    assert [output.token_ids for output in together.outputs] == alone
    assert len(set(alone)) > 1
