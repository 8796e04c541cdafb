"""`ItemBatcher`: batches items for any function that takes a list of them.

An item is a request of the core. Its cost is a number of KV blocks, so the blocks of the pool are the cost that a batch
may have; its steps are output tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, Final, Generic, NamedTuple, TypeVar, Unpack

from lineclear.embedded.answers import EmbeddedFuture
from lineclear.embedded.options import MAX_COUNT, Options, core_limits, deadline, real, whole
from lineclear.embedded.step_loop import StepLoop
from lineclear.errors import InvalidRequest, QueueFull
from lineclear.scheduler.core.events import Finished
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling, StepPlan

_logger = logging.getLogger("lineclear")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MAX_UNITS = 1024  # cost units of a batch: each is a block, and taking one costs 0.1 us
_MAX_POSITIONS = 65_536  # of a batch
_MAX_STEPS = 4096
_CONTINUES, _ENDS = 0, 1  # the "tokens" of an item


class More(Enum):
    """The type of MORE."""

    MORE = "more"


MORE: Final = More.MORE
"""What the function returns for an item that needs another step."""


class ItemFuture(EmbeddedFuture[_Result], Generic[_Result]):
    """The result of an item."""

    def __init__(self, request_id: str, number: int, cancel: Callable[[str], None], item: Any, cost: int) -> None:
        super().__init__(request_id, number, cancel, cost)
        self.item = item
        self.outcome: Any = None
        """What the process function returned for the item last."""

    def finish(self, event: Finished) -> None:
        """Set the result, or the error of an item that needs more steps than it may take."""
        if self.outcome is MORE:
            steps = event.stats.completion_tokens
            self.fail(RuntimeError(f"the item needs more than max_steps = {steps} steps"))
        else:
            self.succeed(self.outcome)


class _Costs(NamedTuple):
    """How costs become blocks of `block_size` positions."""

    target: int
    """Cost of a batch; 0: not bounded."""
    units: int
    """Blocks of a batch."""
    block_size: int

    @classmethod
    def of(cls, target: int, num_slots: int, max_steps: int) -> _Costs:
        if not target:
            return cls(0, num_slots, max_steps)
        most = max(64, min(_MAX_UNITS, _MAX_POSITIONS // max_steps))
        return cls(target, most // target * target if target <= most else most, max_steps)

    def num_blocks(self, num_slots: int) -> int:
        """Return the size of the pool. The core keeps a quarter block for each running request at an admission."""
        headroom = -(-num_slots // 4)
        unit = self.units // self.target if self.target else headroom + 1
        return self.units + (headroom if headroom < unit else 0)

    def blocks_of(self, cost: int) -> int:
        """Return the blocks of an item. One above the target runs alone."""
        if not self.target:
            return 1
        return min(self.units, -(-cost * self.units // self.target))


class ItemBatcher(StepLoop[ItemFuture[_Result]], Generic[_Item, _Result]):
    """Batches items for `process_fn(items) -> results`, which returns one result for each item, in order.

    An exception in place of a result fails that item alone. `MORE` in place of a result keeps the item for another
    step, at most `max_steps`; new items join beside it. A blocking function runs in the batcher's thread. An
    `async def` runs on the event loop of `start`, or in that thread if no loop ran.

    A batch has at most `max_batch_size` items, whose costs sum to at most `target_batch_cost` (0: any sum). An item
    that costs more runs alone. `cost_estimator(item)` returns an item's cost, an integer of at least 1. Without it
    and without `cost` in `submit`, or if it raises, an item costs `default_cost`. A target above 1024
    is kept in 1024 parts, and the cost of an item is rounded up to one.
    """

    def __init__(
        self,
        process_fn: Callable[[list[_Item]], Sequence[_Result | More | Exception]]
        | Callable[[list[_Item]], Awaitable[Sequence[_Result | More | Exception]]],
        *,
        cost_estimator: Callable[[_Item], int] | None = None,
        default_cost: int = 1,
        target_batch_cost: int = 0,
        max_queue_cost: int = 0,
        max_steps: int = 1,
        target_step_ms: float = 200.0,
        **options: Unpack[Options],
    ) -> None:
        max_steps = whole("max_steps", max_steps, 1, _MAX_STEPS)
        target_batch_cost = whole("target_batch_cost", target_batch_cost, 0, MAX_COUNT)
        target_step_ms = real("target_step_ms", target_step_ms, 0.001, 86_400_000)
        is_adaptive = options.get("batching_strategy") == "adaptive"
        limits = core_limits(
            options,
            max_queue_tokens=2**62,
            prefix_cache=False,
            # Otherwise a target would cut an item's cost over several steps.
            target_step_seconds=target_step_ms / 1000 if is_adaptive else 0.0,
        )
        num_slots = limits.max_batch_size
        self._costs = _Costs.of(target_batch_cost, num_slots, max_steps)
        num_blocks = self._costs.num_blocks(num_slots)
        super().__init__(
            process_fn,
            options,
            limits,
            num_blocks=num_blocks,
            block_size=max_steps,
            max_model_len=num_blocks * max_steps + 1,
            max_step_tokens=num_blocks * max_steps,
        )
        self._cost_estimator = cost_estimator
        self._default_cost = whole("default_cost", default_cost, 1, MAX_COUNT)
        self._has_warned = False
        self._max_queue_cost = whole("max_queue_cost", max_queue_cost, 0, MAX_COUNT)
        self._max_steps = max_steps
        self._step_cost = 0

    def submit(
        self,
        item: _Item,
        *,
        cost: int | None = None,
        priority: int = 128,
        timeout_seconds: float | None = None,
        tenant: str = "",
        request_id: str = "",
    ) -> ItemFuture[_Result]:
        """Queue an item; any thread. The future can be awaited, and has the result of the item.

        Raises QueueFull, DuplicateRequest, InvalidRequest or ServerDraining.
        """
        cost = whole("cost", self._estimated_cost(item) if cost is None else cost, 1, MAX_COUNT, InvalidRequest)
        number = next(self._numbers)
        future = ItemFuture[_Result](request_id or str(number), number, self._cancel_request, item, cost)
        request = Request(
            future.request_id,
            (0,) * (self._costs.blocks_of(cost) * self._max_steps - self._max_steps + 1),
            Sampling(seed=number, stop_ids=(_ENDS,)),
            self._max_steps,
            stop_ids=frozenset({_ENDS}),
            priority=whole("priority", priority, 0, 255, InvalidRequest),
            deadline=deadline(timeout_seconds),
            tenant=tenant,
        )
        with self._lock:
            if self._max_queue_cost and self._waiting_cost and self._waiting_cost + cost > self._max_queue_cost:
                raise QueueFull(
                    f"a cost of {self._waiting_cost} is waiting, the limit is {self._max_queue_cost}; retry later",
                    retry_after_seconds=1.0,
                )
            return self._submit(request, future)

    def _estimated_cost(self, item: _Item) -> int:
        if self._cost_estimator is None:
            return self._default_cost
        try:
            return self._cost_estimator(item)
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("cost_estimator failed; items without an estimate cost default_cost", exc_info=True)
            return self._default_cost

    def _compute(self, plan: StepPlan, futures: list[ItemFuture[_Result] | None]) -> list[Any]:
        live = [future for future in futures if future is not None]
        self._step_cost = sum(future.cost for future in live)
        results = self._call([future.item for future in live], len(live)) if live else []
        for future, result in zip(live, results, strict=True):
            future.outcome = result
        return [_ENDS if future is None else _token(future.outcome) for future in futures]

    def _sizes(self, plan: StepPlan) -> tuple[int, int]:
        return self._step_cost, self._step_cost


def _token(outcome: Any) -> int | Exception:
    if isinstance(outcome, Exception):
        return outcome
    return _CONTINUES if outcome is MORE else _ENDS
