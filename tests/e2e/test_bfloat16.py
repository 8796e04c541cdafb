"""Streams of a bfloat16 worker that is killed under load.

Rounding depends on the batch in this format, so a near tie may have the other result. What is promised is that each
token, before and after the kill, is one that the model may choose there, with the noise of its seed and position.
"""

from __future__ import annotations

import numpy as np
import torch
from e2e.killed_worker import answers_over_a_kill
from support.demo import PROMPTS, greedy, model
from support.service import running

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
