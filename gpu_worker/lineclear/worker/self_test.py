"""The self-test before a worker joins: short greedy answers over the path that will serve, against a plain one.

What the load proved (probe.py: the model's own logits over pages; loader.py: the fused forward against that) was proven
without the chosen attention backend, the slots, chunked prompts and the sampler. Here two sequences go through all of
it, and every token must be the one that recomputing the whole sequence over the reference attention gives. Decides
whether the process may serve; a wrong answer is never a warning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from lineclear.wire.messages import Decodes, Row, Sampling, SlotInit, StepPlan

from .attention import Chunk, make_batch
from .attention.reference import ReferenceAttention
from .model.loaded_model import LoadedModel
from .model_runner import ModelRunner
from .runner_interface import StepFailed

log = structlog.get_logger()

_PROMPT_LENS = (19, 13)  # the first chunks are of prompts alone: a step that samples nothing
_NUM_TOKENS = 6
_TIE = {torch.float32: 0.01, torch.float64: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
"""How much less likely than the best a token may be and still be as good, in standard deviations of the logits."""


class SelfTestFailed(Exception):
    """The worker would give wrong answers. Names the step and the path, never a token."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """A prompt and the logits that follow it, greedily. `logits` is [tokens, vocabulary], float32, on the host."""

    prompt: tuple[int, ...]
    logits: Tensor

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        return self.logits.argmax(-1).tolist()


def expected_answers(loaded: LoadedModel, kv_dtype: torch.dtype | None = None) -> tuple[ExpectedAnswer, ...]:
    """The right answers, each token from the whole sequence anew. Leaves the reference attention attached."""
    limit = min(loaded.max_model_len, max(_PROMPT_LENS) + _NUM_TOKENS)
    lengths = [n for n in _PROMPT_LENS if n + _NUM_TOKENS <= limit]
    prompts = [tuple((i * 7 + 3 + n) % loaded.vocab_size for i in range(n)) for n in lengths]
    if not prompts:
        return ()
    backend = ReferenceAttention(loaded.layers, len(prompts), limit, loaded.dtype, loaded.device, kv_dtype)
    loaded.attach(backend)
    with torch.inference_mode():
        return tuple(_greedy(loaded, backend, prompts))


def _greedy(
    loaded: LoadedModel, backend: ReferenceAttention, prompts: Sequence[tuple[int, ...]]
) -> Iterator[ExpectedAnswer]:
    """All of them in each pass, each in a block of its own: a pass costs what reading the weights costs."""
    sequences = [list(prompt) for prompt in prompts]
    steps: list[Tensor] = []
    for _ in range(_NUM_TOKENS):
        ids, positions, last, chunks = list[int](), list[int](), list[int](), list[Chunk]()
        for block, sequence in enumerate(sequences):
            chunks.append(Chunk(len(ids), len(sequence), 0, np.array([block])))
            ids += sequence
            positions += range(len(sequence))
            last.append(len(ids) - 1)
        backend.begin(make_batch(chunks, backend.block_size))
        tokens = torch.tensor(ids, device=loaded.device)
        logits = loaded.logits(tokens, np.arange(len(ids)), np.array(positions), np.array(last)).values
        steps.append(logits.to("cpu", torch.float32, copy=True))  # they are the decoder's until the next call
        for sequence, token in zip(sequences, steps[-1].argmax(-1).tolist(), strict=True):
            sequence.append(token)
    return (ExpectedAnswer(prompt, torch.stack([step[n] for step in steps])) for n, prompt in enumerate(prompts))


def check(runner: ModelRunner, golden: Sequence[ExpectedAnswer], dtype: torch.dtype) -> None:
    """Raise SelfTestFailed unless `runner` gives these answers. Leaves it as if it were new."""
    began_at = time.monotonic()
    fitting = _fitting(runner, golden)
    answers = _serve(runner, fitting)
    runner.reset()
    for one, answer in zip(fitting, answers, strict=True):
        _compare(one, answer, _TIE[dtype], runner.backend_name)
    seconds = round(time.monotonic() - began_at, 3)
    log.info("self_test_passed", sequences=len(fitting), tokens=len(fitting) * _NUM_TOKENS, seconds=seconds)


def _fitting(runner: ModelRunner, golden: Sequence[ExpectedAnswer]) -> list[ExpectedAnswer]:
    """As many as the slots and blocks hold, the longest first. A worker too small for any is not tested."""
    chosen: list[ExpectedAnswer] = []
    blocks = runner.capacity.num_blocks
    most = min(runner.capacity.num_slots, runner.capacity.max_step_tokens)
    for one in golden:
        needed = _num_blocks(runner, one)
        if len(chosen) < most and needed <= blocks:
            chosen.append(one)
            blocks -= needed
    return chosen


def _num_blocks(runner: ModelRunner, one: ExpectedAnswer) -> int:
    return -(-(len(one.prompt) + _NUM_TOKENS) // runner.capacity.block_size)


def _serve(runner: ModelRunner, golden: Sequence[ExpectedAnswer]) -> list[list[int]]:
    """All of `golden` at once: prompts in chunks, blocks taken in turns from the far end, then decodes of all."""
    size = min(8, max(1, runner.capacity.max_step_tokens // max(1, len(golden))))
    free = iter(range(runner.capacity.num_blocks - 1, -1, -1))
    held, start = [0] * len(golden), [0] * len(golden)
    answers: list[list[int]] = [[] for _ in golden]
    runner.reset()
    step = 0
    while any(len(answer) < _NUM_TOKENS for answer in answers):
        step += 1
        decodes, chunks, inits = list[Row](), list[Row](), list[SlotInit]()
        for slot, one in enumerate(golden):
            if len(answers[slot]) == _NUM_TOKENS:
                continue
            if start[slot] == 0:
                inits.append(SlotInit(slot, one.prompt, len(one.prompt), (), Sampling()))
            count = min(size, max(1, len(one.prompt) - start[slot]))
            end = start[slot] + count
            needed = -(-end // runner.capacity.block_size) - held[slot]
            blocks = tuple(next(free) for _ in range(needed))
            row = Row(slot, start[slot], count, end >= len(one.prompt), blocks)
            (decodes if answers[slot] else chunks).append(row)
            held[slot] += needed
            start[slot] = end
        try:
            plan = StepPlan(1, step, tuple(chunks), tuple(inits), decodes=_columns(decodes))
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


def _columns(rows: Sequence[Row]) -> Decodes:
    grown = tuple((row.slot, block) for row in rows for block in row.new_blocks)
    return Decodes(tuple(row.slot for row in rows), tuple(row.start for row in rows), grown)


def _compare(one: ExpectedAnswer, answer: Sequence[int], tie: float, backend: str) -> None:
    for index, (found, wanted) in enumerate(zip(answer, one.tokens, strict=True)):
        if found == wanted:
            continue
        row = one.logits[index]
        gap = float((row.max() - row[found]) / row.std().clamp_min(1e-30))
        if gap <= tie:  # as good as the other one; what follows it is another answer
            return
        raise SelfTestFailed(
            f"token {index} after a prompt of {len(one.prompt)} is wrong: it is {gap:.2g} standard deviations less "
            f"likely than the right one (attention backend {backend}); try --attention-backend reference, and report it"
        )
