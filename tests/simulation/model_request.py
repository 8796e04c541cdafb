"""One live request as the oracle sees it: positions, tokens, and the account it must give at its end."""

from __future__ import annotations

from collections import Counter

from lineclear.scheduler.core.events import RequestStats
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request


class Track:
    """One live request as the oracle sees it."""

    def __init__(self, request: Request, number: int, rank: tuple[float, int], now: float) -> None:
        self.request, self.number, self.rank, self.arrival = request, number, rank, now
        self.answer: list[int] = []  # what it gets alone
        self.began_on = ""  # the fingerprint of the model
        self.received = len(request.output)
        self.limit = len(request.prompt) + request.max_tokens
        self.alive = True
        self.running = False
        self.slot = -1
        self.table: list[int] = []
        self.planned = self.applied = self.known = self.shared = 0
        self.in_flight = 0
        self.residence = 0
        self.high = 0  # positions planned in earlier stays
        self.last_row = 0  # the step of it
        self.soiled = False
        self.preemptions = self.recoveries = self.bypasses = 0
        self.pinned = False
        self.strikes = self.mark = 0
        self.lone: Counter[WorkerLoss] = Counter()
        self.cached = self.recomputed = self.last_step = 0
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and confirmed output."""
        return (*self.request.prompt, *self.answer[: self.received])

    @property
    def todo(self) -> int:
        """Positions that can be planned."""
        return min(self.known, self.limit - 1) - self.planned

    def record(self, now: float, completion: int | None = None) -> RequestStats:
        """The account it must give."""
        return RequestStats(
            arrival=self.arrival,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.received if completion is None else completion,
            cached_tokens=self.cached,
            recomputed_tokens=self.recomputed,
            preemptions=self.preemptions,
            recoveries=self.recoveries,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=now,
            last_step=self.last_step,
        )
