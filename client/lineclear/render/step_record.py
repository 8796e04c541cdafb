"""The record of one executed step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RowKind(StrEnum):
    """What a row computes: positions of a prompt, one position of an answer, or positions that were computed before."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class StepRow:
    """Consecutive positions of one request. `cached_tokens`: positions from the prefix cache."""

    slot: int
    request: int
    start: int
    num_tokens: int
    kind: RowKind
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker. `ended` and `preempted` are numbers of requests."""

    worker: int
    epoch: int
    step: int
    time_seconds: float
    seconds: float
    rows: tuple[StepRow, ...]
    ended: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    num_slots: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    num_blocks: int = 0
