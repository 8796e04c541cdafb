"""What observers learn about steps and requests: numbers, and no content, request id or tenant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class RowKind(Enum):
    """What a row computes."""

    PREFILL = "prefill"
    """Positions of a prompt, or of the beginning of a resumed answer."""
    DECODE = "decode"
    RECOMPUTE = "recompute"
    """Positions that were computed before a preemption or the loss of a worker."""


class StepRows(NamedTuple):
    """The rows of a step as columns. Row i computes positions [start[i], start[i] + num_tokens[i]) of request[i].

    `cached_tokens`: leading positions that the request found in the prefix cache when it got its slot.
    """

    slot: tuple[int, ...]
    request: tuple[int, ...]
    start: tuple[int, ...]
    num_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    kind: tuple[RowKind, ...]
    samples: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An executed step. Requests are numbers of arrival; `worker` is a small number that replaces the epoch.

    `planned_at` is on the engine's clock. `started`, `ended` and `preempted` happened in this step, or after the one
    before. Occupancy is that after the step.
    """

    number: int
    worker: int
    epoch: int
    step: int
    planned_at: float
    step_seconds: float
    total_seconds: float
    rows: StepRows
    started: tuple[int, ...]
    ended: tuple[int, ...]
    preempted: tuple[int, ...]
    num_waiting: int
    num_running: int
    num_slots: int
    blocks_used: int
    blocks_cached: int
    num_blocks: int
