"""Runs the bisection in Triton's interpreter on a CPU and prints a JSON line for each case: both answers.

TRITON_INTERPRET=1 python -m support.interpret_threshold FIRST_SEED END_SEED
"""

from __future__ import annotations

import json
import sys

import torch

from lineclear.worker.sampling import triton_threshold, truncation


def main(first: int, end: int) -> None:
    for seed in range(first, end):
        generator = torch.Generator().manual_seed(seed)
        width = int(torch.randint(1, 3 * triton_threshold.TILE, (), generator=generator))
        probabilities = torch.softmax(torch.randn(3, width, generator=generator) * (seed % 4), dim=-1)
        keys, weights = probabilities.view(torch.int32), None if seed % 2 else probabilities
        most = width if weights is None else 1.0
        targets = torch.rand(3, 1, generator=generator, dtype=torch.float64) * most
        targets[0] = 0.0 if seed % 3 else most + 1
        ours = triton_threshold.largest_reaching(keys, weights, targets)
        by_torch = truncation.largest_reaching(keys, weights, targets)
        print(json.dumps({"ours": ours.tolist(), "torch": by_torch.tolist()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
