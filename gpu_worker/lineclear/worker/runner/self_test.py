"""The self-test before a worker joins: greedy answers from the serving path, compared with expected ones.

Checks at load (compatibility_probe.py, loader.py) run without the chosen attention backend, the input batch, chunked
prompts and the sampler. Here two sequences use all of them. Every token must equal the one from recomputing the whole
sequence with reference attention. A wrong answer always ends the process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from torch import Tensor

from lineclear.wire.messages import Decodes, Row, RowOutput, Sampling, SlotInit, StepPlan
from lineclear.worker.attention.base import Chunk, pack_chunks
from lineclear.worker.attention.reference import ReferenceAttention
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.loaded_model import LoadedModel

from .model_runner import ModelRunner

if TYPE_CHECKING:
    from lineclear.worker.recurrent.states import RecurrentStates

log = structlog.get_logger()

_PROMPT_LENS = (19, 13)  # long enough that the first step holds prompt chunks only and samples nothing
_NUM_TOKENS = 6
_TIE = {torch.float32: 0.01, torch.float64: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Largest gap to the best logit, in standard deviations of the logits, that still counts as a tie."""


class SelfTestFailed(Exception):
    """The worker would give wrong answers. The message names the step and the path, never a token."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """A prompt and the logits of its greedy continuation: [num_tokens, vocabulary], float32, on the host."""

    prompt: tuple[int, ...]
    logits: Tensor

    @property
    def tokens(self) -> list[int]:
        return self.logits.argmax(-1).tolist()


def expected_answers(loaded: LoadedModel, kv_dtype: torch.dtype | None = None) -> tuple[ExpectedAnswer, ...]:
    """Compute the right answers, each token from the whole sequence. Leaves the reference attention attached."""
    limit = min(loaded.max_model_len, max(_PROMPT_LENS) + _NUM_TOKENS)
    lengths = [n for n in _PROMPT_LENS if n + _NUM_TOKENS <= limit]
    prompts = [tuple((i * 7 + 3 + n) % loaded.vocab_size for i in range(n)) for n in lengths]
    if not prompts:
        return ()
    backend = ReferenceAttention(loaded.layers, len(prompts), limit, loaded.dtype, loaded.device, kv_dtype)
    states = loaded.make_states(len(prompts), 0, 1)
    loaded.attach(backend, states)
    with torch.inference_mode():
        return tuple(_greedy(loaded, backend, states, prompts))


def _greedy(
    loaded: LoadedModel, backend: ReferenceAttention, states: RecurrentStates | None, prompts: Sequence[tuple[int, ...]]
) -> Iterator[ExpectedAnswer]:
    """Compute all prompts in each pass, each in one block: reading the weights dominates the cost of a pass."""
    sequences = [list(prompt) for prompt in prompts]
    steps: list[Tensor] = []
    for _ in range(_NUM_TOKENS):
        ids, positions, last, chunks = list[int](), list[int](), list[int](), list[Chunk]()
        for block, sequence in enumerate(sequences):
            chunks.append(Chunk(len(ids), len(sequence), 0, np.array([block])))
            ids += sequence
            positions += range(len(sequence))
            last.append(len(ids) - 1)
        batch = pack_chunks(chunks, backend.block_size)
        backend.start_step(batch)
        if states is not None:
            states.start_step(batch)
        tokens = torch.tensor(ids, device=loaded.device)
        logits = loaded.logits(tokens, np.arange(len(ids)), np.array(positions), np.array(last)).values
        steps.append(logits.to("cpu", torch.float32, copy=True))  # the decoder overwrites them at the next call
        for sequence, token in zip(sequences, steps[-1].argmax(-1).tolist(), strict=True):
            sequence.append(token)
    return (ExpectedAnswer(prompt, torch.stack([step[n] for step in steps])) for n, prompt in enumerate(prompts))


def check(runner: ModelRunner, expected: Sequence[ExpectedAnswer], dtype: torch.dtype) -> None:
    """Raise SelfTestFailed unless `runner` gives the expected answers. Resets the runner."""
    started_at = time.monotonic()
    tested = _select_fitting(runner, expected)
    answers = _generate(runner, tested)
    runner.reset()
    for answer, tokens in zip(tested, answers, strict=True):
        _compare(answer, tokens, _TIE[dtype], runner.backend_name)
    seconds = round(time.monotonic() - started_at, 3)
    log.info("self_test_passed", sequences=len(tested), tokens=len(tested) * _NUM_TOKENS, seconds=seconds)


def _select_fitting(runner: ModelRunner, expected: Sequence[ExpectedAnswer]) -> list[ExpectedAnswer]:
    """Return as many answers as slots and blocks hold, the longest first; none for a very small worker."""
    selected: list[ExpectedAnswer] = []
    num_free_blocks = runner.capacity.num_blocks
    max_answers = min(runner.capacity.num_slots, runner.capacity.max_step_tokens)
    for answer in expected:
        num_blocks = -(-(len(answer.prompt) + _NUM_TOKENS) // runner.capacity.block_size)
        if len(selected) < max_answers and num_blocks <= num_free_blocks:
            selected.append(answer)
            num_free_blocks -= num_blocks
    return selected


def _generate(runner: ModelRunner, expected: Sequence[ExpectedAnswer]) -> list[list[int]]:
    """Generate all answers in one batch: chunked prompts, interleaved blocks from the end of the pool, then decodes."""
    size = min(8, max(1, runner.capacity.max_step_tokens // max(1, len(expected))))
    free = iter(range(runner.capacity.num_blocks - 1, -1, -1))
    num_blocks, start = [0] * len(expected), [0] * len(expected)
    answers: list[list[int]] = [[] for _ in expected]
    runner.reset()
    step = 0
    while any(len(tokens) < _NUM_TOKENS for tokens in answers):
        step += 1
        decodes, chunks, inits = list[Row](), list[Row](), list[SlotInit]()
        for slot, answer in enumerate(expected):
            if len(answers[slot]) == _NUM_TOKENS:
                continue
            if start[slot] == 0:
                inits.append(SlotInit(slot, answer.prompt, len(answer.prompt), (), Sampling()))
            count = min(size, max(1, len(answer.prompt) - start[slot]))
            end = start[slot] + count
            num_new = -(-end // runner.capacity.block_size) - num_blocks[slot]
            blocks = tuple(next(free) for _ in range(num_new))
            output = RowOutput.SAMPLE if end >= len(answer.prompt) else RowOutput.NONE
            row = Row(slot, start[slot], count, output, blocks)
            (decodes if answers[slot] else chunks).append(row)
            num_blocks[slot] += num_new
            start[slot] = end
        try:
            plan = StepPlan(1, step, tuple(chunks), tuple(inits), decodes=_decode_columns(decodes))
            result = runner.launch(plan).result()
        except StepFailed as error:
            raise SelfTestFailed(f"step {step} of the self-test failed: {error.summary}") from error
        if result.bad_rows:
            raise SelfTestFailed(f"step {step} of the self-test gave NaN or infinity")
        sampled = iter(result.tokens)
        for row in plan.rows:
            if row.sample:
                answers[row.slot].append(next(sampled))
    return answers


def _decode_columns(rows: Sequence[Row]) -> Decodes:
    new_blocks = tuple((row.slot, block) for row in rows for block in row.new_blocks)
    return Decodes(tuple(row.slot for row in rows), tuple(row.start for row in rows), new_blocks)


def _compare(answer: ExpectedAnswer, tokens: Sequence[int], tie: float, backend: str) -> None:
    for index, (token, expected) in enumerate(zip(tokens, answer.tokens, strict=True)):
        if token == expected:
            continue
        logits = answer.logits[index]
        gap = float((logits.max() - logits[token]) / logits.std().clamp_min(1e-30))
        if gap <= tie:  # an equally good token; the rest of the answer depends on it
            return
        raise SelfTestFailed(
            f"token {index} after a prompt of {len(answer.prompt)} is wrong: it is {gap:.2g} standard deviations less "
            f"likely than the right one (attention backend {backend}); try --attention-backend reference, and report it"
        )
