"""The state of the core that belongs to one worker: its running batch, its plans in flight, its step-time model.

Everything else is shared by all workers: `shared_state`.
"""

from __future__ import annotations

from collections import deque

from lineclear.scheduler.core.block_pool import BlockHash
from lineclear.scheduler.core.drafts import DraftCosts
from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.policies import STRATEGIES
from lineclear.scheduler.core.running_batch import ChooseDonor, RunningBatch
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.stats import WorkerSnapshot
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import Hello

_RECOVERY_STEPS = 200


class TokenBudget:
    """The tokens of a step: halved by an out-of-memory step, doubled again after 200 steps without one."""

    def __init__(self) -> None:
        self._halvings = 0
        self._steps_to_doubling = 0  # while it is halved

    def tokens(self, max_tokens: int) -> int:
        """Return how many of `max_tokens` tokens the next step may compute."""
        return max(1, max_tokens >> self._halvings)

    def halve(self) -> None:
        """Halve the budget, after an out-of-memory step of several requests."""
        self._halvings += 1
        self._steps_to_doubling = _RECOVERY_STEPS

    def restore(self) -> None:
        """Restore the whole budget: the size of the batch was not the cause."""
        self._halvings = 0

    def count_step(self) -> None:
        """Count a step that was planned."""
        if self._halvings:
            self._steps_to_doubling -= 1
            if self._steps_to_doubling == 0:
                self._halvings -= 1
                self._steps_to_doubling = _RECOVERY_STEPS


class WorkerState:
    """A joined worker, or the place of one that was lost.

    The next worker that joins takes the place with its token budget and batching strategy: after an out-of-memory step
    a worker joins again with the same memory.
    """

    def __init__(self, limits: CoreLimits, block_hash: BlockHash, choose_donor: ChooseDonor | None = None) -> None:
        self._limits = limits
        self.batch = RunningBatch(block_hash, limits.prefix_cache, choose_donor)
        self.strategy = STRATEGIES[limits.batching_strategy](limits.policy)
        self.budget = TokenBudget()
        self.planned_at = float("-inf")
        """Time of the last call of `plan`."""
        self._hello: Hello | None = None
        self._clear()

    def _clear(self) -> None:
        self.step_time = StepTimeModel()
        self.inflight: deque[InflightStep] = deque()
        self.draft_costs = DraftCosts()
        self.last_result_at = 0.0
        self.step = 0
        """The last step planned in this epoch."""
        self.last_step_tokens = self.last_step_positions = 0
        """Positions computed by the last planned step, and held after it."""
        self.max_len = 0
        """The most tokens that a request may have here."""
        self.left: list[Sequence] = []
        """Waiting requests that the last plan left to other workers."""
        self.is_stopping = False
        """It takes no further requests while others do."""

    def join(self, hello: Hello) -> None:
        """Start empty, with the capacity of a worker."""
        self._hello = hello
        self.max_len = min(hello.max_model_len, hello.num_blocks * hello.block_size + 1)  # the last is never computed
        num_slots = min(self._limits.max_batch_size, hello.num_slots)
        self.batch.reset(num_slots, hello.num_slots, hello.num_blocks, hello.block_size)

    def follow(self, limits: CoreLimits) -> None:
        """Follow other limits from the next plan on. Running sequences beyond a smaller number of slots continue."""
        if (limits.batching_strategy, limits.policy) != (self._limits.batching_strategy, self._limits.policy):
            self.strategy = STRATEGIES[limits.batching_strategy](limits.policy)
        self._limits = limits
        self.planned_at = float("-inf")  # a time before now may have an effect again
        if self._hello is not None:
            self.batch.num_slots = min(limits.max_batch_size, self._hello.num_slots)

    def leave(self) -> list[Sequence]:
        """Drop blocks and plans of a lost worker. Returns the sequences that ran on it, oldest first: they wait now.

        Dissolve the decode batch first, so that the sequences' fields are up to date.
        """
        removed = self.batch.remove_all()
        for sequence in dict.fromkeys([*removed, *(s for inflight in self.inflight for s in inflight.sampled())]):
            sequence.num_known = len(sequence.tokens)  # samples in flight are void, and were never computed
            sequence.num_void = 0
            sequence.max_computed_before = min(sequence.max_computed_before, sequence.num_known)
        self._hello = None
        self._clear()
        return removed

    @property
    def hello(self) -> Hello:
        """The Hello of the joined worker."""
        assert self._hello is not None, "no worker is joined here"
        return self._hello

    @property
    def epoch(self) -> int:
        """The epoch of the joined worker."""
        return self.hello.epoch

    @property
    def is_full(self) -> bool:
        """Whether as many plans are in flight as the limits allow."""
        return len(self.inflight) >= self._limits.pipeline_depth

    @property
    def step_tokens(self) -> int:
        """The most tokens that the next step may compute."""
        return self.budget.tokens(self.hello.step_tokens(self._limits.target_batch_tokens))

    def queued_tokens(self) -> int:
        """Return the tokens that are in flight or still to be computed of its running requests' known tokens."""
        prompts = sum(s.num_unplanned for s in self.batch.not_decoding)
        return sum(step.num_tokens for step in self.inflight) + prompts + len(self.batch.decode_batch)

    def next_turn(self) -> float | None:
        """Return when the first request that was left to another worker is left no longer."""
        times = [s.wait_until for s in self.left if s.state is State.WAITING and s.wait_until is not None]
        return min(times, default=None)

    def add_step(self, inflight: InflightStep) -> None:
        """Put a planned step in flight."""
        self.step = inflight.step
        self.last_step_tokens, self.last_step_positions = inflight.num_tokens, self.batch.num_held_positions
        self.inflight.append(inflight)
        self.budget.count_step()

    def snapshot(self) -> WorkerSnapshot:
        """Return a copy of the gauges."""
        pool = self.batch.pool
        return WorkerSnapshot(
            epoch=self.epoch,
            num_slots=self.batch.num_slots,
            num_requests_running=self.batch.num_running,
            steps=self.step,
            steps_in_flight=len(self.inflight),
            num_blocks=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            step_time=self.step_time.coefficients,
            last_step_tokens=self.last_step_tokens,
            last_step_positions=self.last_step_positions,
            is_fitted=self.step_time.is_fitted,
            is_stopping=self.is_stopping,
        )
