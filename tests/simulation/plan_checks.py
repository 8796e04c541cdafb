"""What a plan may be, as the oracle sees it: who has a row in it, how far that goes, and which blocks it takes.

Judges one plan after the other and brings the crowd to where it leads. When the fresh may join is for `joining`, whose
turn it is for `turns`, who may have which block for `holdings`.
"""

from __future__ import annotations

from simulation.invariant_error import hold
from simulation.model_batching import Joining
from simulation.model_request import Track
from simulation.model_state import Crowd, Flight

from lineclear.scheduler.core.events import Event, Preempted, Started
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.wire.messages import Hello, Row, SlotInit, StepPlan

_SMALL_STEPS = 200


class Budget:
    """The tokens of a step; halved by a step that ran out of memory, and given back a while later."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._halvings = self._small_steps = 0

    def tokens(self, hello: Hello) -> int:
        """The most a step may have now."""
        return max(1, min(self._limits.target_batch_tokens, hello.max_step_tokens) >> self._halvings)

    def halve(self) -> None:
        """A step of several ran out of memory."""
        self._halvings += 1
        self._small_steps = _SMALL_STEPS

    def restore(self) -> None:
        """It was one request's doing."""
        self._halvings = self._small_steps = 0

    def a_step_went(self) -> None:
        """Without running out of memory."""
        if self._small_steps:
            self._small_steps -= 1
            if self._small_steps == 0 and self._halvings:
                self._halvings -= 1
                self._small_steps = _SMALL_STEPS if self._halvings else 0


class Plans:
    """Judges what `plan` gives."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.budget = Budget(crowd.limits)
        self.joining = Joining(crowd)
        self.grown: set[Track] = set()  # who took a block in the plan
        self.yielded: set[Track] = set()  # who gave his blocks back while the plan was made: nobody can say when

    def planned(self, plan: StepPlan | None, now: float, events: list[Event]) -> None:
        """`plan` gave `plan`, and `take_events` then `events`."""
        if plan is None:
            hold(events == [], "I13", "nobody starts or yields in a step that is none")
            self._nothing(now)
            return
        hello, in_flight = self.crowd.hello, len(self.crowd.flights)
        hold(hello is not None and in_flight < self.crowd.limits.pipeline_depth, "I9", "a plan too many")
        assert hello is not None
        hold((plan.epoch, plan.step) == (hello.epoch, self.crowd.step + 1), "I9", "steps of an epoch in order")
        self.crowd.step += 1
        budget = self.budget.tokens(hello)
        ready = sorted((t for t in self.crowd.running.values() if t.todo == 1), key=lambda t: t.rank)
        partial = sorted((t for t in self.crowd.running.values() if t.todo > 1), key=lambda t: t.rank)
        slots = {row.slot for row in plan.rows}
        hold(0 < len(slots) == len(plan.rows), "I6", "each slot once in a step, and a step with rows")
        suspect = self.crowd.suspect()
        started = self._heard(events, plan, ready, suspect)
        self.yielded = {self.crowd.live[e.request_id] for e in events if isinstance(e, Preempted)}
        fresh_may = suspect is None and self.joining.is_open(now)
        flight = Flight(plan.step)
        inits = {init.slot: init for init in plan.inits}
        hold(len(inits) == len(plan.inits), "I6", "each slot begun once")
        zeroed = set(plan.zero_blocks)
        hold(len(zeroed) == len(plan.zero_blocks), "I18", "each block zeroed once")
        self.grown.clear()
        total = decoded = 0
        # In the order in which they were planned, in which blocks were handed out.
        prompts_first = self.crowd.limits.scheduling_policy == "prefill_first"
        for row in (*plan.chunks, *plan.decodes.rows()) if prompts_first else plan.rows:
            joins, crowd = row.slot in inits, len(self.crowd.running)
            if joins:
                self._began(inits.pop(row.slot), plan.step, started, fresh_may, now, suspect)
            # So who is gone costs the steps that were in flight when it went, and no more.
            hold(row.slot in self.crowd.running, "I16", "every row belongs to a live request")
            track = self.crowd.running[row.slot]
            deadline = track.request.deadline
            hold(deadline is None or deadline > now, "I16", "no plan has a request whose deadline has passed")
            self._row(track, row, flight, zeroed)
            if joins and suspect is None:
                free = self.crowd.holdings.num_free
                hold(free >= -(-crowd // 4), "I5", "who joins leaves a quarter of a block for each that runs")
            total += row.num_tokens
            decoded += track in ready
        place = {row.slot: index for index, row in enumerate(plan.rows)}
        flight.rows.sort(key=lambda entry: place[entry[0].slot])
        flight.samples.sort(key=lambda track: place[track.slot])
        hold(not inits and not started, "I6", "whoever starts has a row")
        hold(not zeroed, "I18", "only dirty blocks that are handed out are zeroed")
        hold(total <= budget, "I6", "no more tokens than the budget")
        hold(len(self.crowd.running) <= self.crowd.num_slots, "I6", "no more sequences than slots")
        if suspect is None:
            self._by_age(slots, ready, partial, budget, decoded)
        else:
            rows = [row for other in (*self.crowd.flights, flight) for row in other.rows]
            hold(all(track is suspect for track, _, _ in rows), "isolation", "a suspect runs with nobody beside it")
        self.crowd.flights.append(flight)
        self.crowd.tally.steps += 1
        self.crowd.tally.rows += len(plan.rows)
        self.budget.a_step_went()

    def _heard(
        self, events: list[Event], plan: StepPlan, ready: list[Track], suspect: Track | None
    ) -> dict[str, Started]:
        started: dict[str, Started] = {}
        rows = {row.slot for row in plan.rows}
        for event in events:
            if isinstance(event, Started):
                hold(event.request_id not in started, "I11", "started twice")
                started[event.request_id] = event
            else:
                hold(isinstance(event, Preempted), "I11", "planning only starts and preempts")
                assert isinstance(event, Preempted)
                if suspect is None:
                    self._may_yield(self.crowd.live[event.request_id], rows, ready)
                else:
                    youngest = max((t for t in self.crowd.running.values() if t is not suspect), key=lambda t: t.rank)
                    hold(
                        self.crowd.live[event.request_id] is youngest, "isolation", "a suspect takes from the youngest"
                    )
                self._preempted(self.crowd.live[event.request_id])
        return started

    def _may_yield(self, victim: Track, rows: set[int], ready: list[Track]) -> None:
        hold(victim.running, "I15", "only a running sequence is preempted")
        hold(victim.slot not in rows, "I15", "nobody is preempted in a step that has a row of his")
        hold(not victim.pinned, "I15", "a pinned sequence is never preempted")
        short = [
            t
            for t in ready
            if t.running
            and t.rank < victim.rank
            and t.planned == len(t.table) * self.crowd.holdings.size
            and not t.pinned
        ]
        hold(bool(short), "I15", "a victim is younger than somebody who is short of a block")
        chosen = []
        for beneficiary in short:
            younger = [t for t in self.crowd.running.values() if t.rank > beneficiary.rank and not t.pinned]
            younger = [t for t in younger if t.slot not in rows]
            if self.crowd.limits.preemption_policy == "newest":
                chosen.append(max(younger, key=lambda t: t.rank))
            else:
                chosen.append(min(younger, key=lambda t: (self.crowd.holdings.loss(t), -t.rank[0], -t.rank[1])))
        hold(victim in chosen, "I15", "the victim is the one the policy names")

    def _preempted(self, victim: Track) -> None:
        self.crowd.leave(victim, victim.planned)
        victim.preemptions += 1
        victim.pinned = victim.preemptions >= self.crowd.limits.max_preemptions
        self.crowd.resuming[victim] = None
        self.crowd.tally.preemptions += 1

    def _began(
        self,
        init: SlotInit,
        step: int,
        started: dict[str, Started],
        fresh_may: bool,
        now: float,
        suspect: Track | None,
    ) -> None:
        hold(init.sampling.seed in self.crowd.by_number, "I16", "only live requests begin")
        track = self.crowd.by_number[init.sampling.seed]
        hold(0 <= init.slot < self.crowd.num_slots and init.slot not in self.crowd.running, "I6", "a slot that is free")
        hold(track in self.crowd.fresh or track in self.crowd.resuming, "I11", "only who waits begins")
        hold(track.in_flight == 0, "I9", "nobody begins while his samples are in flight")
        hold(init.tokens == track.tokens, "I7", "the worker is told just what is confirmed")
        hold(init.prompt_len == len(track.request.prompt), "I7", "the prompt's length")
        hold(init.sampling == track.request.sampling, "I7", "the sampling parameters asked for")
        hits = self.crowd.holdings.cached_prefix(track)
        hold(list(init.blocks) == hits, "I4", "the longest cached prefix of its own salt is shared, and nothing else")
        if suspect is None:
            peers = [*self.crowd.resuming, *self.crowd.fresh] if track in self.crowd.fresh else self.crowd.resuming
            self.crowd.turns.overtakes(track, peers, self.yielded)
        if track in self.crowd.fresh:
            hold(fresh_may, "strategy", "nobody joins before the strategy lets him")
            self.joining.joined()
            self.crowd.turns.began(track, self.crowd.fresh, alone=suspect is not None)
            del self.crowd.fresh[track]
        else:
            del self.crowd.resuming[track]
        track.running, track.slot = True, init.slot
        track.residence += 1
        self.crowd.running[init.slot] = track
        self.crowd.holdings.share(init.blocks, track)
        track.planned = track.applied = track.shared = len(hits) * self.crowd.holdings.size
        track.known = len(init.tokens)
        self.crowd.tally.looked_up_tokens += len(init.tokens)
        self.crowd.tally.cached_tokens += track.planned
        if track.started_at is None:
            track.started_at, track.cached = now, track.planned
            self.crowd.tally.prompt_tokens += init.prompt_len
            assert self.crowd.hello is not None
            track.began_on = self.crowd.hello.model_fingerprint
            event = Started(track.request.request_id, init.slot, step, track.planned, track.began_on)
            hold(started.pop(track.request.request_id, None) == event, "I11", "the first start is told")

    def _row(self, track: Track, row: Row, flight: Flight, zeroed: set[int]) -> None:
        size, end = self.crowd.holdings.size, row.start + row.num_tokens
        hold(row.start == track.planned and row.num_tokens > 0, "I6", "positions follow one another")
        hold(end <= min(track.known, track.limit - 1), "I6", "no position past what is known or asked for")
        hold(row.sample == (end == track.known), "I6", "a token is sampled when all that is known is computed")
        begins = track.planned == track.shared and track.planned + len(row.new_blocks) * size >= track.known
        for block in row.new_blocks:
            self.crowd.holdings.take(block, track, zeroed, after_a_leave=bool(self.yielded))
        self.grown |= {track} if row.new_blocks else set()
        if row.new_blocks and not begins:
            hold(len(row.new_blocks) == 1 and row.start == (len(track.table) - 1) * size, "I5", "one block when needed")
        most = track.limit - 1 if track.pinned else max(end, track.known)
        hold(-(-end // size) <= len(track.table) <= -(-most // size), "I5", "as many blocks as needed")
        self.crowd.holdings.writes(track, row.start, end)
        if row.start < track.high:
            again = min(end, track.high) - row.start
            track.recomputed += again
            self.crowd.tally.recomputed_tokens += again
        track.planned, track.last_row = end, flight.step
        flight.rows.append((track, track.residence, end))
        if row.sample:
            hold(track.received + track.in_flight < track.request.max_tokens, "I6", "no sample past max_tokens")
            flight.samples.append(track)
            track.in_flight += 1
            track.known += 1

    def _by_age(self, slots: set[int], ready: list[Track], partial: list[Track], budget: int, decoded: int) -> None:
        """Decodes go first, oldest first, and the oldest prompt goes on, unless the order says prompts first."""
        if self.crowd.limits.scheduling_policy != "prefill_first":
            for track in ready:
                if track.running and track.slot not in slots:
                    if track.planned < len(track.table) * self.crowd.holdings.size:
                        hold(decoded == budget, "I6", "a decode waits only for decodes")
                    younger = [t for t in ready if t.rank > track.rank and t.slot in slots]
                    if track.planned == len(track.table) * self.crowd.holdings.size:
                        younger = [t for t in younger if t in self.grown]
                    hold(not younger, "I14", "a decode that waits has no younger one go before it, or take a block")
            room = decoded < budget
        else:
            room = True
        still = [t for t in partial if t.running]
        hold(not still or not room or still[0].slot in slots, "I14", "the oldest prompt goes on")

    def _nothing(self, now: float) -> None:
        if self.crowd.hello is None or len(self.crowd.flights) >= self.crowd.limits.pipeline_depth:
            return
        if not self.crowd.flights:
            hold(self.crowd.suspect() is None, "I13", "a suspect runs, and then the others")
            hold(not self.crowd.running and not self.crowd.resuming, "I13", "who runs goes on, or an older one does")
            hold(not self.joining.is_open(now), "I13", "an idle worker takes whom the strategy lets join")
