"""Run the worker's sampler on made-up logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lineclear.wire.sampling import Sampling
from lineclear.worker.sampling.logits import with_argmax
from lineclear.worker.sampling.sampler import Sampled, sample
from lineclear.worker.sampling.sampling_metadata import SamplingTable

History = list[tuple[list[int], int]]
"""For each row its tokens so far, and how many of them are the prompt."""


def run(logits: Tensor, parameters: list[Sampling], history: History | None = None) -> Sampled:
    """Sample with one slot a row."""
    history = history or [([0], 1)] * len(parameters)
    table = SamplingTable(len(parameters), logits.shape[-1], torch.device("cpu"))
    tokens = torch.zeros(len(parameters), max(len(said) for said, _ in history) + 1, dtype=torch.int64)
    for slot, (said, _) in enumerate(history):
        table.set_slot(slot, parameters[slot])
        tokens[slot, : len(said)] = torch.tensor(said)
    positions = [len(said) for said, _ in history]
    rows = table.select(list(range(len(parameters))), positions, np.array([prompt for _, prompt in history], np.int64))
    return sample(with_argmax(logits.clone()), rows, tokens)


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def all_logprobs(sampled: Sampled, row: int, vocabulary: int) -> Tensor:
    """Return the log-probability of each token; the row asked for all of them."""
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    return torch.zeros(vocabulary).scatter(0, sampled.top_ids[row], sampled.top_logprobs[row])
