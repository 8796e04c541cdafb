"""A worker without tensors whose answers depend on every cell it reads.

The "KV cache" holds token ids. The next token is a hash of the whole context *read back through the block table*, so a
wrong block, a stale share, a lost token, a double free or a write into a neighbour changes the answer; `expected`
computes the right one from the request alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from lineclear.wire.types import Hello, Logprobs, Sampling, SlotInit, StepPlan, StepResult

HOLE = -1
"""What a cell holds before anything is written to it."""


def next_token(context: Sequence[int], sampling: Sampling, prompt_len: int, vocab_size: int) -> int:
    """The token after `context`, a pure function of its arguments."""
    data = array("i", context).tobytes() + sampling.seed.to_bytes(8, "little")
    token = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % vocab_size
    while len(context) - prompt_len < sampling.min_tokens and token in sampling.stop_ids:
        token = (token + 1) % vocab_size
    return token


def expected(prompt: Sequence[int], sampling: Sampling, max_tokens: int, vocab_size: int) -> list[int]:
    """The whole answer to a request, run alone: up to and with the first stop token, at most `max_tokens`."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, sampling, len(prompt), vocab_size))
        if context[-1] in sampling.stop_ids and len(context) - len(prompt) > sampling.min_tokens:
            break
    return context[len(prompt) :]


class _Slot:
    def __init__(self, init: SlotInit) -> None:
        self.tokens = list(init.tokens)
        self.blocks = list(init.blocks)
        self.prompt_len = init.prompt_len
        self.sampling = init.sampling


class ToyFlight:
    """A step that is done already."""

    is_over = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """The result; never blocks."""
        return self._result


class ToyRunner:
    """A Runner (lineclear.worker.protocol) over integer cells. Asserts all that a real worker would only corrupt.

    `is_bad(context)` says for which contexts the "logits" are not finite.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        num_slots: int = 8,
        max_model_len: int = 256,
        vocab_size: int = 97,
        max_step_tokens: int = 4096,
        is_bad: Callable[[Sequence[int]], bool] = lambda context: False,
    ) -> None:
        self.num_blocks, self.block_size, self.num_slots = num_blocks, block_size, num_slots
        self.max_model_len, self.vocab_size, self.max_step_tokens = max_model_len, vocab_size, max_step_tokens
        self.is_bad = is_bad
        self.num_rows = self.num_positions = self.num_samples = 0
        self.reset()

    def hello(self, epoch: int) -> Hello:
        """What this worker can hold."""
        return Hello(
            epoch=epoch,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=(0,),
            max_step_tokens=self.max_step_tokens,
            model_id="toy",
            family="toy",
            dtype="int",
            device="toy",
            attention_backend="toy",
        )

    def reset(self) -> None:
        """Forget every slot and every cell."""
        self.cells = [[HOLE] * self.block_size for _ in range(self.num_blocks)]
        self.slots: dict[int, _Slot] = {}

    def prepare(self) -> bool:
        """There is nothing to prepare."""
        return False

    def launch(self, plan: StepPlan) -> ToyFlight:
        """Run the plan at once."""
        for block in plan.zero_blocks:
            self.cells[block] = [HOLE] * self.block_size
        for init in plan.inits:
            assert 0 <= init.slot < self.num_slots
            self.slots[init.slot] = _Slot(init)
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot twice in a step"
        assert sum(row.num_tokens for row in plan.rows) <= self.max_step_tokens
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        bad: set[int] = set()
        for row in plan.rows:
            slot = self.slots[row.slot]
            slot.blocks.extend(row.new_blocks)
            end = row.start + row.num_tokens
            assert row.num_tokens > 0
            assert end <= len(slot.tokens), "a position whose token is not known"
            assert end <= len(slot.blocks) * self.block_size, "a position without a block"
            for position in range(row.start, end):
                block = slot.blocks[position // self.block_size]
                assert 0 <= block < self.num_blocks
                self.cells[block][position % self.block_size] = slot.tokens[position]
            self.num_rows += 1
            self.num_positions += row.num_tokens
            if row.sample:
                assert end == len(slot.tokens), "sampled in the middle"
                self.num_samples += 1
                size = self.block_size
                context = [self.cells[slot.blocks[p // size]][p % size] for p in range(end)]
                if self.is_bad(context):
                    bad.add(len(tokens))
                token = next_token(context, slot.sampling, slot.prompt_len, self.vocab_size)
                slot.tokens.append(token)
                tokens.append(token)
                top = tuple((token + i, -1.0 - i) for i in range(max(slot.sampling.logprobs, 0)))
                logprobs.append(Logprobs(-float(token), top) if slot.sampling.logprobs >= 0 else None)
        asked = any(entry is not None for entry in logprobs)
        return ToyFlight(
            StepResult(plan.epoch, plan.step, tuple(tokens), tuple(logprobs) if asked else (), frozenset(bad))
        )
