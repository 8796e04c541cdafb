"""Run the scheduler with a step function of your own, in this process, without gRPC, ZeroMQ or torch.

`ItemBatcher` batches items for any function that takes a list. `Batcher` schedules token sequences for a model of your
own. Both run the core of the server (`lineclear.scheduler.core`), from asyncio and from threads. docs/embedding.md has
the guide.
"""

from lineclear.embedded.answers import Answer, Completion
from lineclear.embedded.item_batcher import MORE, ItemBatcher, ItemFuture, More
from lineclear.embedded.options import Options
from lineclear.embedded.step_loop import BatcherStats, StepTotals
from lineclear.embedded.token_batcher import Batcher, SlotRow, StepBatch
from lineclear.errors import DeadlineExceeded, DuplicateRequest, LineclearError, QueueFull, ServerDraining
from lineclear.scheduler.core.events import FinishReason

__all__ = [
    "MORE",
    "Answer",
    "Batcher",
    "BatcherStats",
    "Completion",
    "DeadlineExceeded",
    "DuplicateRequest",
    "FinishReason",
    "ItemBatcher",
    "ItemFuture",
    "LineclearError",
    "More",
    "Options",
    "QueueFull",
    "ServerDraining",
    "SlotRow",
    "StepBatch",
    "StepTotals",
]
