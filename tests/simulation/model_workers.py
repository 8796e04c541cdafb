"""Model of a joined worker: its requests by slot, its steps in flight, its blocks and token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from simulation.invariant_error import require
from simulation.model_batching import ModelBatching
from simulation.model_blocks import ModelBlocks, scope
from simulation.model_cadence import ModelCadence
from simulation.model_sequence import ModelSequence
from simulation.model_states import ModelStates
from simulation.model_swap import ModelSwap

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.wire.messages import Hello, Row, RowOutput

if TYPE_CHECKING:
    from simulation.model_state import ModelState

_RECOVERY_STEPS = 200


class ModelStep:
    """A plan that waits for its result."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[ModelSequence, int, int]] = []  # sequence, its admission_count, end position
        self.outputs: list[tuple[ModelSequence, int, int, int, RowOutput]] = []  # the same with start and output
        self.samples: list[ModelSequence] = []
        self.drafting: set[ModelSequence] = set()  # sequences whose row may verify drafts
        self.num_tokens = 0
        self.planned: list[tuple[ModelSequence, Row]] = []


class Budget:
    """The token budget of a step: halved by an out-of-memory step, doubled again after 200 steps without one."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self._halvings = self._small_steps = 0

    def tokens(self, hello: Hello) -> int:
        return max(1, min(self.limits.target_batch_tokens, hello.max_step_tokens) >> self._halvings)

    def halve(self) -> None:
        self._halvings += 1
        self._small_steps = _RECOVERY_STEPS

    def restore(self) -> None:
        self._halvings = self._small_steps = 0

    def count_step(self) -> None:
        if self._small_steps:
            self._small_steps -= 1
            if self._small_steps == 0 and self._halvings:
                self._halvings -= 1
                self._small_steps = _RECOVERY_STEPS if self._halvings else 0


class ModelWorker:
    """A joined worker, or the place of a lost one, whose budget and batch the next worker takes over."""

    def __init__(self, state: ModelState) -> None:
        self.limits = state.limits
        self.budget = Budget(state.limits)
        self.batching = ModelBatching(state, self)
        self.hello: Hello

    def join(self, hello: Hello) -> None:
        """Start empty."""
        self.hello = hello
        self.num_slots = min(hello.num_slots, self.limits.max_batch_size)
        self.max_len = min(hello.max_model_len, hello.num_blocks * hello.block_size + 1)
        self.states = ModelStates(hello, self.limits.prefix_cache)
        self.blocks = ModelBlocks(self.limits.prefix_cache, self.states)
        self.blocks.reset(hello.num_blocks, hello.block_size)
        self.cadence = ModelCadence()
        self.swap = ModelSwap(replace(hello, num_swap_blocks=0) if hello.has_recurrent_state else hello)
        self.running: dict[int, ModelSequence] = {}  # by slot
        self.finishing: dict[ModelSequence, None] = {}  # last row in flight: without slot, with blocks
        self.inflight: deque[ModelStep] = deque()
        self.step = 0

    @property
    def epoch(self) -> int:
        return self.hello.epoch

    @property
    def is_full(self) -> bool:
        return len(self.inflight) >= self.limits.pipeline_depth

    def stop_running(self, sequence: ModelSequence, computed: int) -> None:
        """Release slot and blocks of a sequence; positions below `computed` count as computed before."""
        self.blocks.release(sequence)
        if sequence in self.finishing:
            del self.finishing[sequence]
        else:
            del self.running[sequence.slot]
        sequence.max_computed_before = max(sequence.max_computed_before, computed)
        sequence.is_running, sequence.slot, sequence.num_drafts = False, -1, 0
        sequence.num_planned = sequence.num_computed = sequence.num_shared = sequence.num_offered = 0
        sequence.boundaries.clear()

    def release_slots(self) -> int:
        """Free the slots of the sequences whose last row is planned; return their number."""
        before = len(self.running)
        for slot, sequence in list(self.running.items()):
            if sequence.num_planned == sequence.max_len - 1 and not sequence.request.sampling.grammar:
                del self.running[slot]
                sequence.slot = -1
                self.finishing[sequence] = None
        return before - len(self.running)

    def queued_tokens(self) -> int:
        """Return the tokens in flight and the known tokens that are not planned yet."""
        unplanned = sum(sequence.num_unplanned for sequence in self.running.values())
        return unplanned + sum(step.num_tokens for step in self.inflight)

    def has_room(self, sequence: ModelSequence, num_released: int = 0, *, shares: bool = True) -> bool:
        """Return whether a slot and blocks for all known tokens and one more are free.

        The last `num_released` slots are free for the next plan only. Without `shares`, all blocks must be free.
        """
        num_running = len(self.running) + num_released
        longest = sequence.max_len - 1
        positions = longest if sequence.protected else min(len(sequence.tokens) + 1, longest)
        shared = self.blocks.cached_prefix(sequence) if shares else []
        needed = -(-max(positions, 1) // self.blocks.size)
        free = self.blocks.num_free - -(-num_running // 4)
        fits = free >= needed or free - self.blocks.num_unused(shared) >= needed - len(shared)
        return fits and num_running < self.num_slots

    def awaits_state(self, sequence: ModelSequence) -> bool:
        """Return whether the plan leaves a state that a waiting sequence can begin with in the next one."""
        return self.states.is_coming(self.blocks.whole_prefix(sequence))

    def may_have_awaited(self, sequence: ModelSequence) -> bool:
        """Return after a plan whether `awaits_state` may have been true: blocks may have been evicted since then."""
        return any(
            of == scope(sequence) and tokens == sequence.tokens[: min(len(tokens), sequence.num_cacheable)]
            for of, tokens in self.states.coming
        )

    def uncached(self, sequence: ModelSequence) -> int:
        """Return how many tokens of a waiting sequence it would compute."""
        num_shared = len(self.blocks.cached_prefix(sequence))
        return len(sequence.tokens) - (num_shared + len(self.swap.find(sequence, num_shared))) * self.blocks.size

    def check_sharing(self, sequence: ModelSequence) -> None:
        """Check a request that starts beside a sibling whose prompt is planned: it computes at most a block of it.

        So n outputs that fit together compute at most the prompt and n blocks. Blocks that were evicted, cleared or
        proved to be bad since then may be missing. A request that reports scores of its prompt computes them.
        """
        num_dropped, sequence.num_dropped = self.blocks.num_dropped, self.blocks.num_dropped
        prompt_len = len(sequence.request.prompt)
        if not self.limits.prefix_cache or sequence.num_cacheable < prompt_len - 1 or self.states.is_recurrent:
            return  # with recurrent state, I34
        for other in sequence.siblings:
            is_beside = other is not sequence and other.is_running and other.epoch == self.epoch
            if is_beside and other.num_planned >= prompt_len - 1 and other.num_dropped == num_dropped:
                is_short = prompt_len - sequence.num_planned <= self.blocks.size
                require(is_short, "I27", "a sibling computes at most a block of the prompt")
