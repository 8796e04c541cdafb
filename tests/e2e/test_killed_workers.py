"""Streams of workers that are killed under load: in bfloat16, and with adapters, compared with PEFT.

Rounding depends on the batch in bfloat16, so a near tie may have the other result. What is promised is that each token,
before and after the kill, is one that the model may choose there, with the noise of its seed and position.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.adapters import peft_answer, save_adapter
from support.demo import PROMPTS, greedy, model
from support.service import running
from support.worker_kills import answers_over_a_kill

from lineclear.worker.sampling.sampling_metadata import uniform

LENGTH, TEMPERATURE = 48, 0.8
LOGIT_ERROR, PROBABILITY_ERROR = 0.25, 0.05


@torch.inference_mode()
def error(prompt: str, answer: tuple[int, ...], seed: int | None) -> float:
    """Return how far a token is from the one that transformers chooses in fp32 behind the same tokens, at most.

    In logits for a greedy answer. For a seeded one in probability: the distance of the noise from the token's share.
    """
    loaded, tokenizer = model()
    ids = tokenizer(prompt)["input_ids"]
    logits = loaded(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1].double()
    rows, chosen = torch.arange(len(answer)), torch.tensor(answer)
    if seed is None:
        logits[:, greedy(1)["banned_token_ids"]] = -torch.inf
        return float((logits.max(dim=-1).values - logits[rows, chosen]).max())
    shares = torch.softmax(logits / TEMPERATURE, dim=-1)
    above = shares.cumsum(dim=-1)[rows, chosen]
    noise = torch.from_numpy(uniform(np.full(len(answer), seed, np.uint64), np.arange(len(answer)) + len(ids)))
    return float(torch.maximum(above - shares[rows, chosen] - noise, noise - above).max())


def test_tokens_are_right_up_to_rounding_over_a_killed_worker() -> None:
    seeds = [None, 1] * (len(PROMPTS) // 2)
    kinds = [greedy(LENGTH) if seed is None else {"temperature": TEMPERATURE, "seed": seed} for seed in seeds]
    with running("--max-batch-size", "6", worker=("--dtype", "bfloat16")) as service:
        assert service.client.stats().worker.dtype == "bfloat16"
        requests = [(p, {"max_tokens": LENGTH, **kind}) for p, kind in zip(PROMPTS, kinds, strict=True)]
        answers = answers_over_a_kill(service, requests)
    for prompt, seed, answer in zip(PROMPTS, seeds, answers, strict=True):
        assert len(answer.token_ids) == LENGTH
        assert error(prompt, answer.token_ids, seed) < (LOGIT_ERROR if seed is None else PROBABILITY_ERROR), prompt


MAX_TOKENS = 60


@pytest.mark.exhaustive
def test_streams_with_adapters_equal_peft_over_worker_kills(tmp_path: Path) -> None:
    loaded, tokenizer = model()
    make_model = partial(copy.deepcopy, loaded)
    folders = {name: save_adapter(make_model(), tmp_path / name, seed) for seed, name in enumerate("ab")}
    asked = [(tokenizer(prompt)["input_ids"], name) for prompt, name in zip(PROMPTS[:3], (None, "a", "b"), strict=True)]
    expected = [peft_answer(make_model, folders[name] if name else None, ids, MAX_TOKENS) for ids, name in asked]
    assert peft_answer(make_model, None, asked[1][0], MAX_TOKENS) != expected[1], "the adapter changes the answer"
    modules = ",".join(f"{name}={path}" for name, path in folders.items())
    with running("--lora-modules", modules) as service:
        params = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        found = answers_over_a_kill(service, [(ids, {"adapter": name, **params}) for ids, name in asked])
        assert [list(answer.token_ids) for answer in found] == expected
