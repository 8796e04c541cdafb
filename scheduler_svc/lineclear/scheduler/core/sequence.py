"""One request and what the scheduler keeps of it while it lives. Decides nothing; `core` moves it through its states.

A sequence's *known* tokens are the confirmed ones plus the samples in flight, whose values only the worker has. One
rule drives everything: `planned` positions catch up with `known`. Prefill, chunked prefill, decode, a prefix hit and
resuming after a preemption or the worker's death are all the distance between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lineclear.scheduler.core.events import RequestStats
from lineclear.wire.messages import Sampling

NOT_DECODING = 1 << 62
"""The beat at which somebody joined who is no member of the decoding ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, validated. `sampling.stop_ids` holds `eos_ids` and `stop_ids` together.

    `deadline` is on the clock the core is given. Requests share cached prefixes only within one `cache_salt`.
    `tenant` stands for whose share it takes, where shares matter; it names nobody.
    `output` is the beginning of the answer where another server made that, of fewer than `max_tokens` tokens.
    `model_fingerprint` is the model that must run it; empty: the one that is there when it begins. `vocabulary` is the
    vocabulary size and the end-of-sequence ids that it was validated with; None: not compared.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    priority: int = 128
    deadline: float | None = None
    cache_salt: bytes = b""
    tenant: str = ""
    output: tuple[int, ...] = ()
    model_fingerprint: str = ""
    vocabulary: tuple[int, tuple[int, ...]] | None = None

    def __repr__(self) -> str:
        """Lengths, never content."""
        return f"Request({self.request_id!r}, prompt_len={len(self.prompt)}, max_tokens={self.max_tokens})"


class State(Enum):
    """WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING when preempted or when the worker is lost."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Sequence:
    """A live request. Owned by the core; nobody else writes to it."""

    __slots__ = (
        "admission_count",
        "arrival",
        "block_keys",
        "blocks",
        "cached_tokens",
        "clear_position",
        "crash_count",
        "decode_joined_at",
        "decode_offset",
        "first_token_at",
        "isolated_crashes",
        "isolated_kills",
        "last_step",
        "last_token_at",
        "max_computed_before",
        "max_len",
        "num_computed",
        "num_known",
        "num_planned",
        "num_published",
        "overtaken_count",
        "pinned",
        "planned_step",
        "preemptions",
        "prompt_len",
        "queue_key",
        "recomputed_tokens",
        "recoveries",
        "request",
        "slot",
        "started_at",
        "state",
        "stop_token_ids",
        "tokens",
    )

    def __init__(self, request: Request, queue_key: tuple[float, int], now: float) -> None:
        self.request = request
        self.queue_key = queue_key  # the lower, the older: who is served first and who never yields to whom
        self.arrival = now
        self.tokens = [*request.prompt, *request.output]  # prompt and confirmed output
        self.prompt_len = len(request.prompt)
        self.max_len = self.prompt_len + request.max_tokens  # `known` never exceeds it
        self.stop_token_ids = frozenset(request.sampling.stop_ids)
        self.state = State.WAITING
        # `decoding` owns these two. While it takes part in beats, fields marked * are as old as its last settle.
        self.decode_joined_at = NOT_DECODING  # the first beat of its part
        self.decode_offset = 0
        # While running:
        self.slot = -1
        self.blocks: list[int] = []
        self.num_planned = 0  # * positions in plans, sent or applied
        self.num_computed = 0  # * positions in applied plans
        self.planned_step = 0  # * the last step it has a row in
        self.admission_count = 0  # grows when it takes a slot: tells rows of an earlier stay from those of this one
        # Always:
        self.num_known = len(self.tokens)  # * tokens and the samples in flight
        self.block_keys: list[bytes] = []  # prefix-cache keys of the leading full blocks, made when needed
        self.num_published = 0  # leading positions in blocks that the prefix cache knows
        self.max_computed_before = 0  # most positions computed in earlier stays: what a new one computes again
        self.preemptions = self.recoveries = self.overtaken_count = 0
        self.crash_count = self.isolated_crashes = self.isolated_kills = self.clear_position = (
            0  # owned by `suspects`; the mark is a position
        )
        self.pinned = False  # preempted too often: holds all the blocks it can ever need and is no victim any more
        self.cached_tokens = self.recomputed_tokens = 0
        self.last_step = 0  # *
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None  # *

    @property
    def num_outputs(self) -> int:
        """Confirmed output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def in_flight(self) -> int:
        """Samples planned, not yet applied."""
        return self.num_known - len(self.tokens)

    @property
    def num_unplanned(self) -> int:
        """Positions that can be planned now. The last output is sampled but never computed."""
        return min(self.num_known, self.max_len - 1) - self.num_planned

    def stats(self, now: float, completion_tokens: int | None = None) -> RequestStats:
        """The account so far, closed at `now`."""
        return RequestStats(
            arrival=self.arrival,
            prompt_tokens=self.prompt_len,
            completion_tokens=self.num_outputs if completion_tokens is None else completion_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            recoveries=self.recoveries,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=now,
            last_step=self.last_step,
        )
