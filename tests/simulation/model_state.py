"""Who there is, as the oracle sees it: who waits, who runs, what is in flight, and on which worker.

Kept by what goes into the core and comes out of it. What must hold of that is for `oracle` and `plans` to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from simulation.invariant_error import hold
from simulation.model_blocks import Holdings
from simulation.model_queue import Turns
from simulation.model_request import Track

from lineclear.errors import KvCapacityExceeded, LineclearError, ModelChanged, PromptTooLong
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import Counters
from lineclear.wire.messages import Hello


class Flight:
    """A plan without its result."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[Track, int, int]] = []  # track, its residence, end
        self.samples: list[Track] = []


class Crowd:
    """All that live, by what they are at, and the worker they live on."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.live: dict[str, Track] = {}
        self.by_number: dict[int, Track] = {}
        self.fresh: dict[Track, None] = {}  # never ran
        self.resuming: dict[Track, None] = {}
        self.running: dict[int, Track] = {}  # by slot
        self.flights: deque[Flight] = deque()
        self.hello: Hello | None = None
        self.step = 0
        self.num_slots = 0
        self.holdings = Holdings(limits.prefix_cache)
        self.turns = Turns(limits)
        self.tally = Counters()
        self.draining = False

    def enters(self, track: Track) -> None:
        """It is let into the queue."""
        self.live[track.request.request_id] = self.by_number[track.number] = track
        self.fresh[track] = None
        self.turns.waits(track)

    def end(self, track: Track) -> None:
        """It is over: nothing of it is left."""
        hold(track.alive, "I10", "a request ends once")
        track.alive = False
        del self.live[track.request.request_id], self.by_number[track.number]
        if track.running:
            self.leave(track, track.applied)
        self.fresh.pop(track, None)
        self.resuming.pop(track, None)
        self.turns.ended(track, self.fresh, nobody_left=not self.live)

    def leave(self, track: Track, high: int) -> None:
        """It runs no more; positions up to `high` have been planned."""
        self.holdings.leave(track)
        del self.running[track.slot]
        track.high = max(track.high, high)
        track.running, track.slot = False, -1
        track.planned = track.applied = track.shared = 0

    def works_for(self, hello: Hello | None) -> None:
        """Another worker, or none: who ran waits, and nothing is in flight."""
        for track in sorted(self.running.values(), key=lambda t: t.rank):
            track.recoveries += 1
            self.leave(track, track.applied)
            self.resuming[track] = None
        for track in self.live.values():
            track.in_flight = 0
            track.high = min(track.high, len(track.tokens))
        self.flights.clear()
        self.hello = hello
        self.step = self.num_slots = 0
        self.holdings.open(0, 1)
        if hello is not None:
            self.num_slots = min(hello.num_slots, self.limits.max_batch_size)
            self.holdings.open(hello.num_blocks, hello.block_size)

    def misfit(self, request: Request, began_on: str = "") -> type[LineclearError] | None:
        """Why the worker that is there can never serve `request`, which began on that model if it did."""
        if self.hello is None:
            return None
        if (request.model_fingerprint or began_on) not in ("", self.hello.model_fingerprint):
            return ModelChanged
        total = len(request.prompt) + request.max_tokens
        if total > self.hello.max_model_len:
            return PromptTooLong
        # The last token is sampled but never computed.
        return KvCapacityExceeded if total - 1 > self.hello.num_blocks * self.hello.block_size else None

    def strike(self, flights: Iterable[Flight]) -> Track | None:
        """Strike who had a row in `flights`; the one who was alone in them."""
        everybody = list({track: None for flight in flights for track, _, _ in flight.rows})
        for track in everybody:
            if track.alive:
                track.strikes += 1
                track.mark = min(max(track.mark, (track.planned or track.known - 1) + 2), track.limit - 1)
        return everybody[0] if len(everybody) == 1 and everybody[0].alive else None

    def suspect(self) -> Track | None:
        """Who has to run with nobody beside it."""
        return min((t for t in self.live.values() if t.strikes >= 2), key=lambda t: t.rank, default=None)
