"""A stand-in for captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lineclear.worker.sampling.logits import Logits


def recorded(run: Callable[[], Logits]) -> tuple[Logits, Callable[[], None]]:
    """Capture by remembering the function: a replay computes again, into the same outputs."""
    logits = run()

    def outputs(of: Logits) -> list[Tensor]:
        return [of.values, of.max_values, of.max_ids, *([] if of.bad is None else [of.bad])]

    @torch.inference_mode()
    def replay() -> None:
        for output, again in zip(outputs(logits), outputs(run()), strict=True):
            output.copy_(again)

    return logits, replay
