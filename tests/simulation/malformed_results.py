"""Results that no correct worker returns for its plan."""

from __future__ import annotations

import random
from dataclasses import replace

from lineclear.wire.messages import Scores, StepResult


def malformed(rng: random.Random, good: StepResult, other_epoch: int) -> StepResult:
    """Return a result that differs from `good` in a way that must be refused."""
    n = len(good.tokens)
    found = rng.choice(
        (
            replace(good, step=good.step + 1),
            replace(good, step=good.step - 1),
            replace(good, epoch=other_epoch),
            replace(good, tokens=(*good.tokens, 1)),
            replace(good, tokens=good.tokens[:-1], step=good.step if n else good.step + 1),
            replace(good, logprobs=(None,) * (n + 1)),
            replace(good, bad_rows=frozenset({good.num_outputs})),
            replace(good, scores=(*good.scores, Scores((0.0,)))),
            replace(good, scores=tuple(x.behind(1) for x in good.scores), counts=() if good.scores else (2,)),
            replace(good, vectors=(*good.vectors, b"")),
            replace(good, bad_rows=frozenset({-1})),
            replace(good, step_seconds=float("nan")),
            replace(good, step_seconds=float("inf")),
            replace(good, step_seconds=-1.0),
            replace(good, counts=(2,) * n, tokens=good.tokens * 2, num_drafted=(), step=good.step + (n == 0)),
            replace(good, num_drafted=(13,) * n, step=good.step + (n == 0)),
            replace(good, counts=(0,) * n, tokens=(), logprobs=(), step=good.step + (n == 0)),
        )
    )
    return replace(good, step=good.step + 1) if found == good else found
