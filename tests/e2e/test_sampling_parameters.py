"""Sampling parameters over real processes: against transformers' `generate`, and under preemption, kills and resume."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from support.demo import PROMPTS, all_at_once, greedy, model
from support.service import Service, running, wait_for
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import Generation, Request
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

LENGTH = 48
MIXED: tuple[dict[str, Any], ...] = (
    {"no_repeat_ngram_size": 2, "temperature": 0.0},
    {"bad_words": ["the", "of the", " and"], "no_repeat_ngram_size": 3, "temperature": 1.0, "seed": 5},
    {"begin_banned_token_ids": list(range(200)), "exponential_decay_factor": 1.02, "temperature": 0.7, "seed": 6},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["."], "temperature": 0.0},
    {"typical_p": 0.6, "top_n_sigma": 2.0, "dynatemp_range": 0.4, "temperature": 1.0, "seed": 7},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "dry_multiplier": 0.8, "temperature": 0.9, "seed": 8},
    {"forced_first_token_id": 77, "frequency_penalty": 1.0, "no_repeat_ngram_size": 4, "temperature": 0.0},
)
"""Parameters that depend on the tokens before; each kind of parameter of docs/sampling.md is in one of them."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running("--max-batch-size", "4", "--target-batch-tokens", "32", "--max-queue-size", "64") as service:
        yield service
        wait_for(service.is_idle, "idle at the end")


def answers(service: Service) -> list[tuple[int, ...]]:
    """Return the answers to all prompts with all of MIXED, at the same time."""
    return [answer.token_ids for params in MIXED for answer in all_at_once(service.client, max_tokens=LENGTH, **params)]


@pytest.fixture(scope="module")
def wanted(service: Service) -> list[tuple[int, ...]]:
    """Each request alone."""
    client = service.client
    by_params = [
        [client.generate(p, ignore_eos=True, max_tokens=LENGTH, **params).token_ids for p in PROMPTS]
        for params in ({"temperature": 0.0}, *MIXED)
    ]
    plain, *others = by_params
    assert all(answers != plain for answers in others), "a parameter without an effect"
    return [answer for answers in others for answer in answers]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeat_ngram_equals_generate(service: Service, size: int) -> None:
    found = all_at_once(service.client, no_repeat_ngram_size=size, **greedy(LENGTH))
    assert [a.token_ids for a in found] == [_generate(p, no_repeat_ngram_size=size) for p in PROMPTS]


def test_token_sequences_of_bad_words_are_not_written(service: Service) -> None:
    words, tokenizer = ["the", "and", "of the", "United Kingdom"], model()[1]
    sequences = [
        tuple(tokenizer.encode(space + word, add_special_tokens=False)) for word in words for space in ("", " ")
    ]
    plain = all_at_once(service.client, **greedy(LENGTH))
    for answer, free in zip(all_at_once(service.client, bad_words=words, **greedy(LENGTH)), plain, strict=True):
        assert not [ids for ids in sequences if _contains(answer.token_ids, ids)]
        is_free = not any(_contains(free.token_ids, ids) for ids in sequences)
        assert (answer.token_ids == free.token_ids) == is_free


def _contains(answer: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    return any(answer[start : start + len(ids)] == ids for start in range(len(answer)))


def test_forced_first_token_equals_generate(service: Service) -> None:
    found = all_at_once(service.client, forced_first_token_id=77, **greedy(LENGTH))
    assert {a.token_ids[0] for a in found} == {77}
    tokenizer = model()[1]
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = [*tokenizer(prompt)["input_ids"], 77]
        assert service.client.generate(ids, **greedy(LENGTH - 1)).token_ids == answer.token_ids[1:]


def test_growing_weight_of_the_end_ends_answers(service: Service) -> None:
    ends = [service.client.generate(p, temperature=0.0, max_tokens=200, exponential_decay_start=8,
                                    exponential_decay_factor=1.5) for p in PROMPTS]  # fmt: skip
    assert {answer.finish_reason for answer in ends} == {"stop_eos"}
    assert max(len(answer.token_ids) for answer in ends) < 60


def _generate(prompt: str, **params: Any) -> tuple[int, ...]:
    loaded, tokenizer = model()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = loaded.generate(**inputs, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, **params)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


# --- the same tokens in any case -----------------------------------------------------------------------------------


def test_batch_mates_change_no_token(service: Service, wanted: list[tuple[int, ...]]) -> None:
    assert answers(service) == wanted


def test_depth_one_changes_no_token(wanted: list[tuple[int, ...]]) -> None:
    with running("--max-batch-size", "4", "--pipeline-depth", "1") as service:
        assert answers(service) == wanted


def test_preemption_changes_no_token(wanted: list[tuple[int, ...]]) -> None:
    with running("--max-batch-size", "8", worker=("--num-blocks", "26", "--block-size", "4")) as service:
        assert answers(service) == wanted
        assert service.client.stats().counters.preemptions > 0


def test_killed_worker_changes_no_token(service: Service, wanted: list[tuple[int, ...]]) -> None:
    seen = threading.Event()

    def read(prompt: str, params: dict[str, Any]) -> Generation:
        with service.client.stream(prompt, ignore_eos=True, max_tokens=LENGTH, **params) as stream:
            for delta in stream:
                if delta.first_index >= 10:
                    seen.set()
        return stream.result

    with ThreadPoolExecutor(len(PROMPTS) * len(MIXED)) as pool:
        found = [pool.submit(read, prompt, params) for params in MIXED for prompt in PROMPTS]
        assert seen.wait(PATIENCE_SECONDS)
        os.kill(service.worker_pid, signal.SIGKILL)
        assert [answer.result().token_ids for answer in found] == wanted
    assert max(answer.result().timings.recoveries for answer in found) >= 1


@pytest.mark.parametrize("cut", [1, 20, LENGTH - 1])
def test_resume_changes_no_token(service: Service, wanted: list[tuple[int, ...]], cut: int) -> None:
    """A resumed answer continues with the tokens that the first server would have sent."""
    for number, params in enumerate(MIXED):
        request = {"ignore_eos": True, "max_tokens": LENGTH, **params}
        whole = wanted[number * len(PROMPTS)]
        assert _resumed(service, Request.of(PROMPTS[0], **request).to_proto(), whole[:cut]) == whole[cut:]


def _resumed(service: Service, message: pb.GenerateRequest, received: tuple[int, ...]) -> tuple[int, ...]:
    fingerprint = service.client.model().model_fingerprint
    message.resume.CopyFrom(pb.Resume(token_ids=received, model_fingerprint=fingerprint))
    with grpc.insecure_channel(service.target) as channel:
        responses = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(message))
    return tuple(token_id for response in responses for token_id in response.token_ids)
