"""Model of a live request: positions, tokens and statistics."""

from __future__ import annotations

from collections import Counter

from lineclear.scheduler.core.events import RequestStats
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import PoolingKind, RowOutput, Scores


class ModelSequence:
    """A live request. Fields are named as those of the core's Sequence where they mean the same."""

    def __init__(self, request: Request, queue_key: tuple[float, int], now: float) -> None:
        self.request, self.queue_key, self.arrival = request, queue_key, now
        self.since = now if request.queued_since is None else request.queued_since  # its place in the queue's order
        self.siblings: tuple[ModelSequence, ...] = ()  # the outputs of one request, this one included
        self.num_dropped = 0  # cached blocks that the worker had dropped at its admission
        self.answer: list[int] = []  # what the request gets when it runs alone
        self.scores: list[Scores] = []  # the same, of each position that is scored
        self.vector = b""
        self.is_pooled = False  # the vector was reported
        scoring = request.scoring
        self.first_scored = len(request.prompt) - 1 if scoring is None else scoring.first_position
        self.num_scores = 0  # reported
        self.void_admission = 0  # scores and vectors of rows in flight up to this admission do not count
        self.started_on = ""  # fingerprint of the model
        self.num_outputs = len(request.output)
        self.max_len = len(request.prompt) + (1 if request.pooling else request.max_tokens)
        self.is_live = True
        self.is_running = False
        self.epoch = 0  # of the worker that it runs on, or ran on last
        self.was_isolated = False  # ran alone as a suspect, on the worker of this epoch
        self.passed_at: float | None = None  # first plan that may have left it to another worker
        self.is_left = False  # a plan has certainly left it to another worker
        self.left_until = float("-inf")  # latest time until which it may be left
        self.slot = -1
        self.blocks: list[int] = []
        self.num_planned = self.num_computed = self.num_known = 0
        self.num_shared = 0  # leading positions from the prefix cache
        self.num_published = 0  # the same, and those that results have published
        self.num_offered = 0  # leading positions in blocks that were offered to the prefix cache
        self.boundaries: list[int] = []  # positions at which rows end, for the state behind them
        self.state_at = 0  # position of the last state that was kept, or that it began with
        self.num_void = 0  # samples in flight that do not count
        self.in_flight = 0
        self.num_drafts = 0  # that the row in flight may verify
        self.drafted_tokens = self.accepted_tokens = 0
        self.admission_count = 0
        self.max_computed_before = 0
        self.planned_step = 0
        self.tainted = False
        self.preemptions = self.recoveries = self.overtaken_count = 0
        self.num_resumed_before = 0  # overtakes by resuming sequences, which count if the strategy was open then
        self.protected = False
        self.crash_count = self.clear_position = 0
        self.isolated_losses: Counter[WorkerLoss] = Counter()
        self.cached_tokens = self.recomputed_tokens = self.last_step = 0
        self.started_at: float | None = None
        self.resumed_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def number(self) -> int:
        return self.queue_key[1]

    def defer(self) -> None:
        """Drop the samples in flight, one of which has arrived; the last known position is computed again."""
        self.num_known, self.num_void = self.num_known - 1, self.in_flight
        self.max_computed_before = min(self.max_computed_before, len(self.tokens))
        if self.is_running:
            self.num_drafts = 0
            self.num_planned = self.num_computed = len(self.tokens) - 1

    @property
    def is_stuck_now(self) -> bool:
        """Whether the request fails with its next sample: its grammar allows no token."""
        if not self.request.max_tokens or self.num_outputs < len(self.answer) or self.num_outputs >= self.max_tokens:
            return False
        sampling = self.request.sampling
        return not (self.answer and self.answer[-1] in sampling.stop_ids and len(self.answer) > sampling.min_tokens)

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.answer[: self.num_outputs])

    @property
    def scored_to(self) -> int:
        """The prompt position up to which scores are reported or not requested."""
        return self.first_scored + self.num_scores

    @property
    def num_cacheable(self) -> int:
        """Number of leading positions without a score, vector or sample to report."""
        pooling = self.request.pooling
        if pooling is not None:
            return 0 if pooling.kind is PoolingKind.MEAN else len(self.request.prompt) - 1
        last = len(self.request.prompt) - 1
        return self.scored_to if self.scored_to < last else len(self.tokens) - 1

    def output_of(self, position: int) -> RowOutput:
        """Return what a row reports for a position."""
        pooling, last = self.request.pooling, len(self.request.prompt) - 1
        if pooling is not None:
            is_pooled = pooling.kind is PoolingKind.MEAN or position == last
            return RowOutput.POOL if is_pooled else RowOutput.NONE
        if self.scored_to <= position < last:
            return RowOutput.SCORE
        return RowOutput.SAMPLE if position == self.num_known - 1 else RowOutput.NONE

    @property
    def is_complete(self) -> bool:
        """Whether all that the request asks for was reported; for requests without output."""
        return self.request.pooling is None and self.scored_to == len(self.request.prompt) - 1

    @property
    def may_wait_for_drafts(self) -> bool:
        """Whether it may leave out steps until the results of its rows in flight."""
        return self.request.max_drafts > 0 and self.in_flight > 0

    @property
    def num_unplanned(self) -> int:
        """Number of positions that can be planned now: none before it is known how many drafts were accepted."""
        if self.num_drafts or self.num_void:
            return 0
        return min(self.num_known, self.max_len - 1) - self.num_planned

    def stats(self, now: float, completion_tokens: int | None = None) -> RequestStats:
        return RequestStats(
            arrival=self.arrival,
            prompt_tokens=len(self.request.prompt),
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
