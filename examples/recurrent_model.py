"""Serves a small recurrent model in numpy: prompts of different lengths share each step, one state a slot."""

import numpy as np

from lineclear.embedded import Batcher, StepBatch

VOCABULARY, WIDTH, SLOTS = 50, 32, 4
random = np.random.default_rng(0)
embedding, output = random.normal(size=(2, VOCABULARY, WIDTH))
recurrent = random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
states = np.zeros((SLOTS, WIDTH))


def step(batch: StepBatch) -> list[int]:
    """Compute the tokens of all rows, one position of every row at a time."""
    for row in batch.rows:
        if row.is_new:
            states[row.slot] = 0.0
    for position in range(max(len(row.tokens) for row in batch.rows)):
        rows = [row for row in batch.rows if position < len(row.tokens)]
        slots, tokens = [row.slot for row in rows], [row.tokens[position] for row in rows]
        states[slots] = np.tanh(states[slots] @ recurrent + embedding[tokens])
    logits = states[[row.slot for row in batch.sampling_rows]] @ output.T
    return [int(token) for token in logits.argmax(axis=1)]


with Batcher(step, max_batch_size=SLOTS) as batcher:
    answers = [batcher.submit(range(length), max_tokens=5 + length) for length in range(1, 9)]
    for answer in answers:
        print(*answer)
    print(f"{batcher.stats().steps} steps for {sum(len(answer.tokens) for answer in answers)} tokens")
