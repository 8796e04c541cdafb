"""The shapes that attention is timed on, at any context."""

from __future__ import annotations

import random

import pytest

from bench.micro_attention import BLOCK_SIZE, CHUNK, _pool, prompt


@pytest.mark.parametrize("context", [0, 64, 256, 2048])
def test_prompt_fits_the_pool_at_every_context(context: int) -> None:
    (chunk,) = prompt(random.Random(0), context).chunks
    assert (chunk.start, chunk.num_queries) == (context, CHUNK)
    assert len(set(chunk.blocks.tolist())) == -(-(context + CHUNK) // BLOCK_SIZE) <= _pool(2, context)
