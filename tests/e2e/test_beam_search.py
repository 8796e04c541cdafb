"""Beam search over real processes equals transformers' `generate(num_beams=...)`, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.demo import model
from support.service import Service, running, wait_for

NUM_PROMPTS = 50


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running("--max-batch-size", "8") as service:
        yield service
        wait_for(service.is_idle, "idle at the end")


def cases() -> list[tuple[list[int], dict[str, Any], list[int]]]:
    """Return prompts, parameters of `generate`, and tokens that end an output."""
    rng = random.Random(11)
    found = []
    for number in range(NUM_PROMPTS):
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(1, 40))]
        num_beams = rng.choice((2, 3, 4, 4, 6))
        params = {
            "num_beams": num_beams,
            "num_return_sequences": rng.randint(1, num_beams),
            "length_penalty": rng.choice((1.0, 0.0, -1.0, 0.6, 2.0)),
            "early_stopping": rng.choice((False, True, "never")),
            "max_new_tokens": rng.choice((4, 12, 24)),
        }
        if number % 4 == 0:
            params["min_new_tokens"] = 3
        found.append((prompt, params, [rng.randrange(10, 4000) for _ in range(rng.choice((0, 2, 14)))]))
    return found


def reference(prompt: list[int], params: dict[str, Any], ends: list[int]) -> tuple[list[list[int]], list[float]]:
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


def test_beams_equal_transformers_on_50_prompts(service: Service) -> None:
    asked = [(prompt, params, sorted({*likely_ends(prompt), *ends})) for prompt, params, ends in cases()]

    def ask(case: tuple[list[int], dict[str, Any], list[int]]) -> Any:
        prompt, params, ends = case
        return service.client.generate(
            prompt, n=params["num_return_sequences"], num_beams=params["num_beams"], eos_token_ids=ends,
            length_penalty=params["length_penalty"], early_stopping=params["early_stopping"],
            max_tokens=params["max_new_tokens"], min_tokens=params.get("min_new_tokens"),
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, asked))
    num_ended = 0
    for case, answer in zip(asked, answers, strict=True):
        tokens, scores = reference(*case)
        assert [list(output.token_ids) for output in answer.outputs] == tokens, case
        assert [output.score for output in answer.outputs] == pytest.approx(scores, rel=1e-4, abs=1e-4)
        num_ended += sum(output.finish_reason == "stop_eos" for output in answer.outputs)
    assert num_ended > 20, "few beams ended with an end-of-sequence token"
    assert any(output.finish_reason == "length" for answer in answers for output in answer.outputs)


def test_outputs_equal_single_requests_on_the_model(service: Service) -> None:
    prompt = list(range(20, 220))
    params: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95}
    before = service.client.stats().counters.step_tokens
    together = service.client.generate(prompt, n=8, seed=41, **params)
    wait_for(service.is_idle, "idle")
    computed = service.client.stats().counters.step_tokens - before
    assert computed <= len(prompt) + 8 * 16 + 8 * 15, "outputs compute the prompt once, and each the rest of its block"
    alone = [service.client.generate(prompt, seed=41 + index, **params).token_ids for index in range(8)]
    assert [output.token_ids for output in together.outputs] == alone
    assert len(set(alone)) > 1
