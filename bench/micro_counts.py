"""Counts what the scheduler core plans: slots used and prompt positions computed. No clock is read.

    python -m bench.micro_counts

The worker has immediate results, and the pipeline is full: a result is applied when no further plan can be made.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Iterator
from functools import cache

from bench.figures import Figure, arguments, main
from bench.instant import BLOCK_SIZE, TOKEN, InstantRunner
from lineclear.scheduler.core.events import Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling, StepPlan, StepResult

SLOTS = 8
DEPTHS = (1, 2, 3)
LONGEST_ANSWERS = (4, 8, 16)
PREFIX, BUDGETS = 512, (256, 2048, 8192)
_REQUESTS = 2000
_SLOT_GOAL, _SHARED_GOAL = 0.97, 0.99
_EQUAL_PROMPTS = 8
_POSITIONS_GOAL = PREFIX + _EQUAL_PROMPTS * BLOCK_SIZE
PARTIAL_PROMPT, PARTIAL_PREFIX = 510, 505
"""Tokens of prompts and prefixes that end inside a block."""


class Counts:
    """A core with a worker that answers at once. Counts rows and positions of its plans."""

    def __init__(self, num_slots: int, depth: int, budget: int = 2048) -> None:
        limits = CoreLimits(
            max_batch_size=num_slots,
            pipeline_depth=depth,
            target_batch_tokens=budget,
            max_queue_size=1 << 20,
            max_queue_tokens=1 << 30,
        )
        self.core = Scheduler(limits)
        self.core.worker_joined(InstantRunner(num_slots).hello(1), 0.0)
        self.num_slots = num_slots
        self.steps_with_queue = self.rows_with_queue = self.positions = 0
        self.cached: dict[str, int] = {}
        """Cached positions of each ended request."""
        self._flights: deque[StepPlan] = deque()

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Queue a request."""
        self.core.submit(Request(request_id, prompt, Sampling(), max_tokens), 0.0)

    def run(self) -> None:
        """Run until all requests have ended."""
        while self.core.num_live:
            while self.step():
                pass
            plan = self._flights.popleft()
            result = StepResult(plan.epoch, plan.step, (TOKEN,) * plan.num_samples, step_seconds=0.01)
            for event in self.core.apply(result, 0.0):
                if isinstance(event, Finished):
                    self.cached[event.request_id] = event.stats.cached_tokens

    def step(self) -> bool:
        """Plan a step. Returns False if none can be planned before the next result."""
        plan = self.core.plan(1, 0.0)
        self.core.drain_events()
        if plan is None:
            return False
        self._count(plan)
        self._flights.append(plan)
        return True

    def _count(self, plan: StepPlan) -> None:
        self.positions += plan.num_tokens
        if self.core.snapshot().num_requests_waiting:
            self.steps_with_queue += 1
            self.rows_with_queue += plan.num_rows


@cache
def slot_use(longest_answer: int, depth: int) -> float:
    """Return the share of slots with a row, over the steps with a queue. Answers have 1 to `longest_answer` tokens."""
    rng = random.Random(longest_answer)
    counts = Counts(SLOTS, depth)
    for number in range(_REQUESTS):
        counts.submit(f"r{number}", (number, *range(rng.randint(1, 40))), rng.randint(1, longest_answer))
    counts.run()
    return counts.rows_with_queue / (counts.steps_with_queue * SLOTS)


@cache
def equal_prompts(budget: int) -> int:
    """Return the prompt positions computed for 8 equal prompts of 512 tokens that arrive together."""
    counts = Counts(SLOTS, depth=2, budget=budget)
    for number in range(_EQUAL_PROMPTS):
        counts.submit(f"r{number}", tuple(range(PREFIX)), 1)
    counts.run()
    return counts.positions


@cache
def shared_prefix(budget: int, num_slots: int) -> float:
    """Return the share of a prefix of 512 tokens that 64 requests take from the first. Their last 32 tokens differ."""
    counts = Counts(num_slots, depth=2, budget=budget)
    for number in range(64):
        counts.submit(f"r{number}", (*range(PREFIX), *range(1000 * number, 1000 * number + 32)), 8)
    counts.run()
    return sum(counts.cached.values()) / (63 * PREFIX)


def equal_partial_prompts(budget: int, *, in_turn: bool) -> int:
    """Return the prompt positions computed for 8 equal prompts of 510 tokens, in one step or each a step later."""
    counts = Counts(SLOTS, depth=2, budget=budget)
    for number in range(_EQUAL_PROMPTS):
        counts.submit(f"r{number}", tuple(range(PARTIAL_PROMPT)), 1)
        if in_turn:
            counts.step()
    counts.run()
    return counts.positions


def shared_partial_prefix(budget: int, num_slots: int) -> int:
    """Return the prompt positions computed for 64 requests that share 505 tokens; their last 32 tokens differ."""
    counts = Counts(num_slots, depth=2, budget=budget)
    for number in range(64):
        counts.submit(f"r{number}", (*range(PARTIAL_PREFIX), *range(1000 * number, 1000 * number + 32)), 8)
    counts.run()
    return counts.positions - 64 * 7  # decodes of 8 tokens: the first is sampled by the prompt's last row


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Count all figures."""
    for longest in LONGEST_ANSWERS:
        for depth in DEPTHS:
            case = f"answers of 1-{longest} tokens, depth {depth}"
            goal = _SLOT_GOAL if depth == 2 else None
            yield Figure("slots: share used", case, slot_use(longest, depth), "", goal, more_is_better=True)
    for budget in BUDGETS:
        case = f"{_EQUAL_PROMPTS} equal prompts of {PREFIX} tokens together, {budget} tokens a step"
        yield Figure("prefix: positions computed", case, equal_prompts(budget), "", _POSITIONS_GOAL)
    for num_slots in (SLOTS, 64):
        for budget in BUDGETS:
            case = f"{PREFIX} tokens of 64 requests, {num_slots} slots, {budget} tokens a step"
            share = shared_prefix(budget, num_slots)
            yield Figure("prefix: share cached", case, share, "", _SHARED_GOAL, more_is_better=True)
    for budget in BUDGETS:
        for in_turn in (False, True):
            when = "one step after the other" if in_turn else "together"
            case = f"{_EQUAL_PROMPTS} equal prompts of {PARTIAL_PROMPT} tokens {when}, {budget} tokens a step"
            yield Figure("prefix: positions computed", case, equal_partial_prompts(budget, in_turn=in_turn), "")
    for num_slots in (SLOTS, 64):
        for budget in BUDGETS:
            case = f"64 requests that share {PARTIAL_PREFIX} tokens, {num_slots} slots, {budget} tokens a step"
            yield Figure("prefix: positions computed", case, shared_partial_prefix(budget, num_slots), "")


if __name__ == "__main__":
    raise SystemExit(main(figures, arguments(__doc__)))
