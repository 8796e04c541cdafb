"""Prompts for the demo model, and the answers of transformers' `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from support.service import DEMO_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from lineclear.client import Client, Generation

PROMPTS = (
    "The capital of France is",
    "Today's weather is so",
    "In machine learning, a transformer is",
    "Once upon a time in a land far away,",
    "Quantum computing differs from classical computing because",
    "The history of the Roman Empire began",
    "My favourite food is",
    "A fox and a crow",
)
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 12345}


@cache
def reference(prompt: str, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens that transformers generates greedily in fp32."""
    loaded, tokenizer = model()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = loaded.generate(**inputs, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


@cache
def model() -> tuple[Any, Any]:
    loaded = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return loaded.eval(), AutoTokenizer.from_pretrained(DEMO_MODEL)


def all_at_once(client: Client, **params: Any) -> list[Generation]:
    """Return the answers to all PROMPTS, requested at the same time."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: client.generate(prompt, ignore_eos=True, **params), PROMPTS))


def greedy(max_tokens: int) -> dict[str, Any]:
    """Return the parameters of a request whose answer must equal `reference`."""
    # transformers bans end-of-sequence until min_new_tokens, so ban it here as well.
    eos = model()[0].generation_config.eos_token_id
    banned = [eos] if isinstance(eos, int) else list(eos)
    return {"temperature": 0.0, "max_tokens": max_tokens, "banned_token_ids": banned}
