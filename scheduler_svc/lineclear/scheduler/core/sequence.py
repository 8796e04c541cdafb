"""A request and its scheduler state.

The *known* tokens of a sequence are its confirmed tokens plus the samples in flight, whose values only the worker has.
Planning makes `num_planned` catch up with `num_known`. As in vLLM there is no prefill or decode phase. Prefill, chunked
prefill, decode, a prefix-cache hit, and resuming after a preemption or a worker loss differ only in that distance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from lineclear.scheduler.core.events import RequestStats
from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, Sampling

_ISOLATE_AFTER_CRASHES = 2


class Scoring(NamedTuple):
    """Asks for the log-probability of each prompt token behind `first_position`, and of the `num_top` most likely."""

    first_position: int
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request. `sampling.stop_ids` holds `eos_ids` and `stop_ids` together.

    `deadline` is on the core's clock. Requests share cached prefixes only within one `cache_salt` and `adapter`.
    `adapter` is the key of the adapter that the model runs with (core/adapter_table.py); empty: none. `tenant` is the
    hashed tenant id that the fair order counts by.
    `expected_tokens` estimates the output tokens, at most `max_tokens`; 0: as many as `max_tokens`. Only the order of
    requests depends on it. `wants_position` asks for its place in the queue.
    `output` is the beginning of the answer, fewer than `max_tokens` tokens, if another server made it.
    `model_fingerprint` is the model that must run the request; empty: the model that is joined when it starts.
    `queued_since` is the time that its place in the queue's order counts from; None: the time of its submission.
    `is_sibling`: it follows another request of the same call, and takes no place in the queue.
    `vocabulary` is the vocabulary size and the end-of-sequence ids that it was validated with; None: not compared.
    With `max_tokens` 0, `scoring` or `pooling` is what the request is for.
    `max_drafts` is the most drafts that a row verifies; 0: plain decoding.
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
    expected_tokens: int = 0
    wants_position: bool = False
    model_fingerprint: str = ""
    vocabulary: tuple[int, tuple[int, ...]] | None = None
    adapter: bytes = b""
    scoring: Scoring | None = None
    pooling: Pooling | None = None
    is_sibling: bool = False
    queued_since: float | None = None
    max_drafts: int = 0

    def __repr__(self) -> str:
        """Return lengths, never content."""
        return f"Request({self.request_id!r}, prompt_len={len(self.prompt)}, max_tokens={self.max_tokens})"

    @property
    def cache_scope(self) -> bytes:
        """What starts the chain of prefix-cache keys. Requests with different scopes share no block."""
        return self.cache_salt + self.adapter

    @property
    def expected_len(self) -> int:
        """Expected number of prompt and output tokens."""
        return len(self.prompt) + (self.expected_tokens or self.max_tokens)

    @property
    def is_search_step(self) -> bool:
        return self.queued_since is not None

    @property
    def continues(self) -> bool:
        """Whether it continues an answer whose requests so far have ended: a later step of a beam search."""
        return self.is_sibling and self.is_search_step

    @property
    def shares_prompt(self) -> bool:
        """Whether an earlier request of its call has the same prompt: outputs of one answer, not parts of a Score."""
        return self.is_sibling and self.max_tokens > 0

    @property
    def charged_before(self) -> int:
        """Number of leading tokens that its tenant was charged with for other requests of the same call."""
        if not self.shares_prompt:
            return 0
        return len(self.prompt) + (len(self.output) if self.continues else 0)

    @property
    def is_constrained(self) -> bool:
        """Whether it has a grammar: a row that samples for it may be deferred."""
        return self.sampling.grammar != ""

    @property
    def max_len(self) -> int:
        """Upper bound of the positions it computes, plus one: the last output token is never computed."""
        return len(self.prompt) + (self.max_tokens if self.pooling is None else 1)


class State(Enum):
    """WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING on a preemption or a worker loss."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request. Only the core writes to it.

    While it is in the decode batch, fields marked * are as of the last `sync`.
    """

    request: Request
    queue_key: tuple[float, int]
    """Lower: served earlier, and never preempted for a higher key. Ends in the number."""
    arrival: float
    tokens: list[int] = field(init=False)
    """Prompt and confirmed output."""
    prompt_len: int = field(init=False)
    max_len: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    state: State = State.WAITING
    # Owned by DecodeBatch:
    in_decode_batch: bool = False
    decode_joined_at: int = 0  # its first decode step
    decode_offset: int = 0  # position of its row, minus the decode step
    epoch: int = 0  # of the worker that it runs on, or ran on last
    wait_until: float | None = None  # while waiting: the time until which it is left to a better worker
    # While running:
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_planned: int = 0  # * positions in plans, sent or applied
    num_computed: int = 0  # * positions in applied plans
    planned_step: int = 0  # * the last step it has a row in
    admission_count: int = 0  # distinguishes rows of an earlier admission
    num_drafts: int = 0  # drafts that its row in flight may verify; until the result, its length is not known
    # The same since the last admission, where the worker has recurrent state (core/state_pool.py):
    boundaries: tuple[int, ...] = ()  # positions at which rows end, because the state is kept there
    state_at: int | None = None  # position of the last state that was kept, or that it began with
    # Always:
    num_known: int = field(init=False)  # * tokens and samples in flight
    leading_blocks: dict[int, tuple[list[bytes], list[bytes]]] = field(default_factory=dict)
    """By block size, which may differ between workers, and made when needed: the key that starts the chain with the
    prefix-cache keys of the leading full blocks, and their `token_bytes`."""
    num_published: int = 0  # leading computed positions in blocks that were offered to the prefix cache
    num_offered: int = 0  # the same with planned positions
    num_void: int = 0
    """Samples in flight to drop: they were computed from values that are not finite, or behind a deferred row."""
    void_admission: int = 0  # the same for scores and vectors: drop those of this admission and earlier ones
    num_scored: int = field(init=False)
    """Leading positions of the prompt whose score is not requested, or has been reported."""
    max_computed_before: int = 0  # most positions computed in earlier admissions: computing them again is counted
    preemptions: int = 0
    recoveries: int = 0
    overtaken_count: int = 0
    # Owned by PoisonDetector:
    crash_count: int = 0
    isolated_crashes: int = 0
    isolated_kills: int = 0
    clear_position: int = 0  # where the crashes are forgotten
    protected: bool = False  # preempted too often: gets all blocks it can ever need, and is not preempted again
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_hits: float = 0.0  # accepted drafts of the last rows
    draft_tries: float = 0.0  # those, and rejected ones
    last_step: int = 0  # *
    started_at: float | None = None
    resumed_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None  # *

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = [*request.prompt, *request.output]
        self.prompt_len, self.max_len = len(request.prompt), request.max_len
        self.stop_token_ids = frozenset(request.sampling.stop_ids)
        self.num_known = len(self.tokens)
        self.num_scored = self.prompt_len - 1 if request.scoring is None else request.scoring.first_position

    @property
    def number(self) -> int:
        """Order of arrival from 1, unique in a core."""
        return self.queue_key[1]

    @property
    def num_outputs(self) -> int:
        """Number of confirmed output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def in_flight(self) -> int:
        """Number of samples planned and not yet applied."""
        return self.num_known - len(self.tokens)

    @property
    def num_unplanned(self) -> int:
        """Number of positions that can be planned now. The last output token is sampled but never computed."""
        if self.num_drafts or self.num_void:
            return 0
        return min(self.num_known, self.max_len - 1) - self.num_planned

    @property
    def is_prefilling(self) -> bool:
        """Whether it has a row to plan that is no decode: of several positions, or of a request without output."""
        return self.num_unplanned > (1 if self.request.max_tokens else 0)

    @property
    def is_decoding(self) -> bool:
        """Whether it lacks one position, to sample behind."""
        return self.num_unplanned == 1 and self.request.max_tokens > 0

    @property
    def has_stopped(self) -> bool:
        """Whether its last token ends the answer."""
        return self.tokens[-1] in self.stop_token_ids and self.num_outputs > self.request.sampling.min_tokens

    @property
    def must_isolate(self) -> bool:
        """Whether it must run alone: it is suspected of the loss of workers (core/poison_detector.py)."""
        return self.crash_count >= _ISOLATE_AFTER_CRASHES

    @property
    def num_lost(self) -> int:
        """Number of planned positions that a preemption loses: those that the prefix cache does not give back."""
        return self.num_planned - (self.num_published if self.state_at is None else self.state_at)

    @property
    def num_skippable(self) -> int:
        """Number of leading positions that need no row of their own if their keys and values are cached.

        A sample, a score and the vector of the last token need a row at their positions, the mean at all positions.
        """
        pooling = self.request.pooling
        if pooling is not None and pooling.kind is PoolingKind.MEAN:
            return 0
        return min(self.num_scored, self.prompt_len - 1) if self.has_scores_left else len(self.tokens) - 1

    @property
    def has_scores_left(self) -> bool:
        """Whether scores of the prompt have not been reported yet."""
        return self.num_scored < self.prompt_len - 1

    def is_scored_at(self, position: int) -> bool:
        """Return whether a row that starts at `position` reports scores."""
        return self.has_scores_left and self.num_scored <= position < self.prompt_len - 1

    def next_row(self, end: int) -> tuple[int, RowOutput]:
        """Return the end of the row that starts at `num_planned`, at most `end`, and its output.

        All positions of a row have the same output, so a row ends where the scored part of the prompt begins or ends.
        It ends at the boundaries, too.
        """
        if self.boundaries and end > self.boundaries[0]:
            end = self.boundaries[0]
        pooling, last = self.request.pooling, self.prompt_len - 1
        if pooling is not None:
            is_pooled = pooling.kind is PoolingKind.MEAN or end == self.prompt_len
            return end, RowOutput.POOL if is_pooled else RowOutput.NONE
        if self.num_planned < last and self.has_scores_left:
            if self.num_planned < self.num_scored:
                return min(end, self.num_scored), RowOutput.NONE
            return min(end, last), RowOutput.SCORE
        return end, RowOutput.SAMPLE if end == self.num_known else RowOutput.NONE

    def stats(self, now: float, completion_tokens: int | None = None) -> RequestStats:
        """Return the request's statistics, ended at `now`."""
        return RequestStats(
            arrival=self.arrival,
            prompt_tokens=self.prompt_len,
            completion_tokens=self.num_outputs if completion_tokens is None else completion_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            recoveries=self.recoveries,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=now,
            resumed_at=self.resumed_at,
            last_step=self.last_step,
        )
