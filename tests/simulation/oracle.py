"""What must be true of a scheduler, kept as a model of its own from what goes in and what comes out.

Nothing here reads the core's state, except `snapshot`, which is part of what comes out. Whose turn it is, is judged by
`turns`, who holds which block by `holdings`; this file follows requests, steps, tokens and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from simulation.breach import Breach, hold
from simulation.holdings import Holdings
from simulation.scenario import Scenario
from simulation.track import Track
from simulation.turns import Turns
from support.events import flat
from support.toy import expected

from lineclear.errors import (
    CannotFit,
    DeadlineExceeded,
    DeviceOutOfMemory,
    Draining,
    DuplicateRequest,
    InternalError,
    LineclearError,
    NonFiniteLogits,
    PoisonRequest,
    PromptTooLong,
    QueueFull,
)
from lineclear.scheduler.scheduling.core import CoreSnapshot
from lineclear.scheduler.scheduling.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Preempted,
    Started,
    TokensReady,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.scheduling.ledger import Counters
from lineclear.scheduler.scheduling.sequence import Request
from lineclear.scheduler.scheduling.suspects import Loss
from lineclear.wire.types import Hello, Row, SlotInit, StepError, StepErrorKind, StepPlan, StepResult

_COUNTERS = [field.name for field in fields(Counters)]
_SMALL_STEPS = 200


def is_bad(context: Sequence[int], per_mille: int) -> bool:
    """Whether the logits after `context` are not finite, in a world with that share of such contexts."""
    return per_mille > 0 and (sum(context) * 2654435761 + len(context) * 40503) % 1000 < per_mille


class _Flight:
    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[Track, int, int]] = []  # track, its residence, end
        self.samples: list[Track] = []


class Oracle:
    """Follows every call and says what each must answer."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.limits = scenario, scenario.limits
        self.live: dict[str, Track] = {}
        self.by_number: dict[int, Track] = {}
        self.fresh: dict[Track, None] = {}
        self.resuming: dict[Track, None] = {}
        self.running: dict[int, Track] = {}
        self.flights: deque[_Flight] = deque()
        self.hello: Hello | None = None
        self.step = 0
        self.num_slots = 0
        self.holdings = Holdings(scenario.limits.prefix_cache)
        self.tally = Counters()
        self.draining = False
        self.turns = Turns(scenario.limits)
        self.turned_away = False
        self.batch_places, self.batch_begun_at = 0, float("-inf")
        self.halvings = self.small_steps = 0
        self.grown: set[Track] = set()  # who took a block in the plan
        self.yielded: set[Track] = set()  # who gave his blocks back while the plan was made: nobody can say when

    # --- calls ------------------------------------------------------------------------------------------------------

    def submitted(self, request: Request, now: float, outcome: list[Event] | LineclearError) -> None:
        """`submit` gave `outcome`."""
        error = self._refusal(request)
        if error is not None:
            self.tally.requests_rejected += 1
            self.turned_away = self.turned_away or error is QueueFull
            hold(type(outcome) is error, "I12", "refused at the door, and for the right reason")
            return
        hold(outcome == [Admitted(request.request_id)], "I12", "admitted when nothing speaks against it")
        rank = self.turns.arrives(request, now)
        track = Track(request, request.sampling.seed, rank, now)
        track.pinned = self.limits.max_preemptions == 0
        track.answer = expected(request.prompt, request.sampling, request.max_tokens, self.scenario.vocab_size)
        self.live[request.request_id] = self.by_number[track.number] = track
        self.fresh[track] = None
        self.turns.waits(track)
        self.tally.requests_admitted += 1

    def cancelled(self, request_id: str, error: type[LineclearError], now: float, events: list[Event]) -> None:
        """`cancel` gave `events`."""
        track = self.live.get(request_id)
        if track is None:
            return hold(events == [], "I10", "nothing happens to an unknown request")
        self._end(track)
        self.tally.requests_cancelled += 1
        return self._same(events, [(Failed, request_id, error, track.record(now))])

    def stopped(self, request_id: str, num_tokens: int, now: float, events: list[Event]) -> None:
        """`finish` gave `events`."""
        track = self.live.get(request_id)
        if track is None:
            return hold(events == [], "I10", "nothing happens to an unknown request")
        self._end(track)
        self.tally.requests_finished += 1
        record = track.record(now, num_tokens)
        return self._same(events, [Finished(request_id, FinishReason.STOP_STRING, None, record)])

    def expired(self, now: float, events: list[Event]) -> None:
        """`expire` gave `events`."""
        due = [t for t in self.live.values() if t.request.deadline is not None and t.request.deadline <= now]
        wanted = []
        for track in sorted(due, key=lambda t: (t.request.deadline, t.rank[1])):
            self._end(track)
            self.tally.requests_expired += 1
            wanted.append((Failed, track.request.request_id, DeadlineExceeded, track.record(now)))
        self._same(events, wanted)

    def reset(self, hello: Hello | None, now: float, events: list[Event], loss: Loss = Loss.LEFT) -> None:
        """`reset` gave `events`."""
        wanted: list[object] = [] if self.hello is None else [WorkerLost(self.hello.epoch)]
        lone = self._strike(self.flights) if loss is not Loss.LEFT else None
        if lone is not None and lone.strikes > 1:
            lone.lone[loss] += 1
            crashes, kills = lone.lone[Loss.BROKE], lone.lone[Loss.KILLED]
            if crashes / self.limits.max_lone_crashes + kills / self.limits.max_lone_kills >= 1.0:
                self._end(lone)
                self.tally.requests_failed += 1
                wanted.append((Failed, lone.request.request_id, PoisonRequest, lone.record(now)))
        for track in sorted(self.running.values(), key=lambda t: t.rank):
            track.recoveries += 1
            self._leave(track, track.applied)
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
            wanted.append(WorkerJoined(hello.epoch))
            for track in list(self.live.values()):
                error = self._misfit(track.request)
                if error is not None:
                    self._end(track)
                    self.tally.requests_failed += 1
                    wanted.append((Failed, track.request.request_id, error, track.record(now)))
        self._same(events, wanted)

    def failed_step(self, error: StepError, now: float, events: list[Event]) -> None:
        """`fail_step` gave `events`."""
        wanted: list[object] = []
        if self.flights and error.kind is StepErrorKind.OUT_OF_MEMORY:
            rows = self.flights[0].rows
            if len(rows) > 1:
                self.halvings += 1
                self.small_steps = _SMALL_STEPS
                self._strike([self.flights[0]])
            elif rows[0][0].alive:
                track = rows[0][0]
                self._end(track)
                self.halvings = self.small_steps = 0
                self.tally.requests_failed += 1
                wanted.append((Failed, track.request.request_id, DeviceOutOfMemory, track.record(now)))
        self._same(events, wanted)

    def _strike(self, flights: Iterable[_Flight]) -> Track | None:
        """Strike who had a row in `flights`; the one who was alone in them."""
        everybody = list({track: None for flight in flights for track, _, _ in flight.rows})
        for track in everybody:
            if track.alive:
                track.strikes += 1
                track.mark = min(max(track.mark, (track.planned or track.known - 1) + 2), track.limit - 1)
        return everybody[0] if len(everybody) == 1 and everybody[0].alive else None

    def _suspect(self) -> Track | None:
        """Who has to run with nobody beside it."""
        return min((t for t in self.live.values() if t.strikes >= 2), key=lambda t: t.rank, default=None)

    def forgot(self) -> None:
        """`forget_prefixes` was called."""
        self.holdings.forget()

    # --- a plan -----------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan | None, now: float, events: list[Event]) -> None:
        """`plan` gave `plan`, and `take_events` then `events`."""
        if plan is None:
            hold(events == [], "I13", "nobody starts or yields in a step that is none")
            return self._nothing_to_plan(now)
        hold(self.hello is not None and len(self.flights) < self.limits.pipeline_depth, "I9", "a plan too many")
        assert self.hello is not None
        hold((plan.epoch, plan.step) == (self.hello.epoch, self.step + 1), "I9", "steps of an epoch in order")
        self.step += 1
        budget = self._budget()
        ready = sorted((t for t in self.running.values() if t.todo == 1), key=lambda t: t.rank)
        partial = sorted((t for t in self.running.values() if t.todo > 1), key=lambda t: t.rank)
        slots = {row.slot for row in plan.rows}
        hold(0 < len(slots) == len(plan.rows), "I6", "each slot once in a step, and a step with rows")
        suspect = self._suspect()
        started = self._heard(events, plan, ready, suspect)
        self.yielded = {self.live[e.request_id] for e in events if isinstance(e, Preempted)}
        fresh_may = suspect is None and self._fresh_may_join(now)
        flight = _Flight(plan.step)
        inits = {init.slot: init for init in plan.inits}
        hold(len(inits) == len(plan.inits), "I6", "each slot begun once")
        zeroed = set(plan.zero_blocks)
        hold(len(zeroed) == len(plan.zero_blocks), "I18", "each block zeroed once")
        self.grown.clear()
        total = decoded = 0
        # In the order in which they were planned, in which blocks were handed out.
        prompts_first = self.limits.order == "prefill_first"
        for row in (*plan.chunks, *plan.decodes.rows()) if prompts_first else plan.rows:
            joins, crowd = row.slot in inits, len(self.running)
            if joins:
                self._began(inits.pop(row.slot), plan.step, started, fresh_may, now, suspect)
            hold(row.slot in self.running, "I16", "every row belongs to a live request")
            track = self.running[row.slot]
            deadline = track.request.deadline
            hold(deadline is None or deadline > now, "I16", "no plan has a request whose deadline has passed")
            self._row(track, row, flight, zeroed)
            if joins and suspect is None:
                free = self.holdings.num_free
                hold(free >= -(-crowd // 4), "I5", "who joins leaves a quarter of a block for each that runs")
            total += row.num_tokens
            decoded += track in ready
        place = {row.slot: index for index, row in enumerate(plan.rows)}
        flight.rows.sort(key=lambda entry: place[entry[0].slot])
        flight.samples.sort(key=lambda track: place[track.slot])
        hold(not inits and not started, "I6", "whoever starts has a row")
        hold(not zeroed, "I18", "only dirty blocks that are handed out are zeroed")
        hold(total <= budget, "I6", "no more tokens than the budget")
        hold(len(self.running) <= self.num_slots, "I6", "no more sequences than slots")
        if suspect is None:
            self._by_age(slots, ready, partial, budget, decoded)
        else:
            rows = [row for other in (*self.flights, flight) for row in other.rows]
            hold(all(track is suspect for track, _, _ in rows), "isolation", "a suspect runs with nobody beside it")
        self.flights.append(flight)
        self.tally.steps += 1
        self.tally.rows += len(plan.rows)
        if self.small_steps:
            self.small_steps -= 1
            if self.small_steps == 0 and self.halvings:
                self.halvings -= 1
                self.small_steps = _SMALL_STEPS if self.halvings else 0
        return None

    def _budget(self) -> int:
        assert self.hello is not None
        return max(1, min(self.limits.target_batch_tokens, self.hello.max_step_tokens) >> self.halvings)

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
                    self._may_yield(self.live[event.request_id], rows, ready)
                else:
                    youngest = max((t for t in self.running.values() if t is not suspect), key=lambda t: t.rank)
                    hold(self.live[event.request_id] is youngest, "isolation", "a suspect takes from the youngest")
                self._preempted(self.live[event.request_id])
        return started

    def _may_yield(self, victim: Track, rows: set[int], ready: list[Track]) -> None:
        hold(victim.running, "I15", "only a running sequence is preempted")
        hold(victim.slot not in rows, "I15", "nobody is preempted in a step that has a row of his")
        hold(not victim.pinned, "I15", "a pinned sequence is never preempted")
        short = [
            t
            for t in ready
            if t.running and t.rank < victim.rank and t.planned == len(t.table) * self.holdings.size and not t.pinned
        ]
        hold(bool(short), "I15", "a victim is younger than somebody who is short of a block")
        chosen = []
        for beneficiary in short:
            younger = [t for t in self.running.values() if t.rank > beneficiary.rank and not t.pinned]
            younger = [t for t in younger if t.slot not in rows]
            if self.limits.victim == "newest":
                chosen.append(max(younger, key=lambda t: t.rank))
            else:
                chosen.append(min(younger, key=lambda t: (self.holdings.loss(t), -t.rank[0], -t.rank[1])))
        hold(victim in chosen, "I15", "the victim is the one the policy names")

    def _preempted(self, victim: Track) -> None:
        self._leave(victim, victim.planned)
        victim.preemptions += 1
        victim.pinned = victim.preemptions >= self.limits.max_preemptions
        self.resuming[victim] = None
        self.tally.preemptions += 1

    def _fresh_may_join(self, now: float) -> bool:
        """Whether the strategy lets requests that never ran join the step that begins now."""
        if not self.fresh:
            return False
        policy, waiting = self.limits.policy, len(self.fresh)
        active = len(self.running) + len(self.resuming)
        oldest = min(t.arrival for t in self.fresh)
        late = self.draining or now >= oldest + policy.batch_timeout_seconds
        if self.limits.strategy == "fixed_size":
            if self.batch_places and oldest <= self.batch_begun_at:
                return True  # the batch is still being admitted
            full = waiting >= self.num_slots or self.draining or self.turned_away
            self.batch_places, self.batch_begun_at = self.num_slots if full and active == 0 else 0, now
            return self.batch_places > 0
        if self.limits.strategy == "dynamic_timeout":
            full = waiting >= max(1, self.num_slots - active) or waiting >= policy.min_batch_size > 1
            return late or full
        return late or active > 0 or waiting >= min(policy.min_batch_size, self.num_slots)

    def _began(
        self,
        init: SlotInit,
        step: int,
        started: dict[str, Started],
        fresh_may: bool,
        now: float,
        suspect: Track | None,
    ) -> None:
        hold(init.sampling.seed in self.by_number, "I16", "only live requests begin")
        track = self.by_number[init.sampling.seed]
        hold(0 <= init.slot < self.num_slots and init.slot not in self.running, "I6", "a slot that is free")
        hold(track in self.fresh or track in self.resuming, "I11", "only who waits begins")
        hold(track.in_flight == 0, "I9", "nobody begins while his samples are in flight")
        hold(init.tokens == track.tokens, "I7", "the worker is told just what is confirmed")
        hold(init.prompt_len == len(track.request.prompt), "I7", "the prompt's length")
        hold(init.sampling == track.request.sampling, "I7", "the sampling parameters asked for")
        hits = self.holdings.cached_prefix(track)
        hold(list(init.blocks) == hits, "I4", "the longest cached prefix of its own salt is shared, and nothing else")
        if suspect is None:
            peers = [*self.resuming, *self.fresh] if track in self.fresh else self.resuming
            self.turns.overtakes(track, peers, self.yielded)
        if track in self.fresh:
            hold(fresh_may, "strategy", "nobody joins before the strategy lets him")
            self.batch_places -= 1
            fixed = self.limits.strategy == "fixed_size"
            hold(not fixed or self.batch_places >= 0, "strategy", "a fixed batch has as many places as slots")
            self.turned_away = False
            self.turns.began(track, self.fresh, alone=suspect is not None)
            del self.fresh[track]
        else:
            del self.resuming[track]
        track.running, track.slot = True, init.slot
        track.residence += 1
        self.running[init.slot] = track
        self.holdings.share(init.blocks, track)
        track.planned = track.applied = track.shared = len(hits) * self.holdings.size
        track.known = len(init.tokens)
        self.tally.looked_up_tokens += len(init.tokens)
        self.tally.cached_tokens += track.planned
        if track.started_at is None:
            track.started_at, track.cached = now, track.planned
            self.tally.prompt_tokens += init.prompt_len
            event = Started(track.request.request_id, init.slot, step, track.planned)
            hold(started.pop(track.request.request_id, None) == event, "I11", "the first start is told")

    def _row(self, track: Track, row: Row, flight: _Flight, zeroed: set[int]) -> None:
        size, end = self.holdings.size, row.start + row.num_tokens
        hold(row.start == track.planned and row.num_tokens > 0, "I6", "positions follow one another")
        hold(end <= min(track.known, track.limit - 1), "I6", "no position past what is known or asked for")
        hold(row.sample == (end == track.known), "I6", "a token is sampled when all that is known is computed")
        begins = track.planned == track.shared and track.planned + len(row.new_blocks) * size >= track.known
        for block in row.new_blocks:
            self.holdings.take(block, track, zeroed, after_a_leave=bool(self.yielded))
        self.grown |= {track} if row.new_blocks else set()
        if row.new_blocks and not begins:
            hold(len(row.new_blocks) == 1 and row.start == (len(track.table) - 1) * size, "I5", "one block when needed")
        most = track.limit - 1 if track.pinned else max(end, track.known)
        hold(-(-end // size) <= len(track.table) <= -(-most // size), "I5", "as many blocks as needed")
        self.holdings.writes(track, row.start, end)
        if row.start < track.high:
            again = min(end, track.high) - row.start
            track.recomputed += again
            self.tally.recomputed_tokens += again
        track.planned, track.last_row = end, flight.step
        flight.rows.append((track, track.residence, end))
        if row.sample:
            hold(track.received + track.in_flight < track.request.max_tokens, "I6", "no sample past max_tokens")
            flight.samples.append(track)
            track.in_flight += 1
            track.known += 1

    def _by_age(self, slots: set[int], ready: list[Track], partial: list[Track], budget: int, decoded: int) -> None:
        """Decodes go first, oldest first, and the oldest prompt goes on, unless the order says prompts first."""
        if self.limits.order != "prefill_first":
            for track in ready:
                if track.running and track.slot not in slots:
                    if track.planned < len(track.table) * self.holdings.size:
                        hold(decoded == budget, "I6", "a decode waits only for decodes")
                    younger = [t for t in ready if t.rank > track.rank and t.slot in slots]
                    if track.planned == len(track.table) * self.holdings.size:
                        younger = [t for t in younger if t in self.grown]
                    hold(not younger, "I14", "a decode that waits has no younger one go before it, or take a block")
            room = decoded < budget
        else:
            room = True
        still = [t for t in partial if t.running]
        hold(not still or not room or still[0].slot in slots, "I14", "the oldest prompt goes on")

    def _nothing_to_plan(self, now: float) -> None:
        if self.hello is None or len(self.flights) >= self.limits.pipeline_depth:
            return
        if not self.flights:
            hold(self._suspect() is None, "I13", "a suspect runs, and then the others")
            hold(not self.running and not self.resuming, "I13", "who runs goes on, or an older one does")
            hold(not self._fresh_may_join(now), "I13", "an idle worker takes whom the strategy lets join")

    # --- a result ---------------------------------------------------------------------------------------------------

    def applied(self, result: StepResult, now: float, events: list[Event]) -> None:
        """`apply` took in `result` and gave `events`."""
        flight = self.flights.popleft()
        hold(result.step == flight.step, "I9", "results in the order of plans")
        wanted: list[object] = []
        for index, (track, token) in enumerate(zip(flight.samples, result.tokens, strict=True)):
            track.in_flight -= 1
            if not track.alive:
                self.tally.wasted_samples += 1
                track.wasted += 1
                hold(track.wasted <= self.limits.pipeline_depth, "I16", "who is gone costs the steps in flight at most")
                continue
            bad = index in result.bad_rows
            request_id = track.request.request_id
            if not bad:
                context = (*track.request.prompt, *track.answer[: track.received])
                hold(not is_bad(context, self.scenario.bad_per_mille), "I20", "bad logits are found")
            if bad or not 0 <= token < self.scenario.vocab_size:
                self.holdings.soil(track)
                self._end(track)
                self.tally.requests_failed += 1
                wanted.append((Failed, request_id, NonFiniteLogits if bad else InternalError, track.record(now)))
                continue
            right = track.received < len(track.answer) and token == track.answer[track.received]
            hold(right, "I20", "the answer is the one the request gets alone")
            logprobs = result.logprobs[index] if result.logprobs else None
            wanted.append(TokensReady(request_id, track.received, (token,), () if logprobs is None else (logprobs,)))
            hold((logprobs is not None) == (track.request.sampling.logprobs >= 0), "I24", "logprobs for who asked")
            track.received += 1
            track.first_token_at = now if track.first_token_at is None else track.first_token_at
            track.last_token_at, track.last_step = now, flight.step
            self.tally.output_tokens += 1
        soiled = {t for i, t in enumerate(flight.samples) if i in result.bad_rows}
        tokens = enumerate(result.tokens)
        soiled |= {flight.samples[i] for i, token in tokens if not 0 <= token < self.scenario.vocab_size}
        self.holdings.settle(flight.step, soiled)
        for track, residence, end in flight.rows:
            if track.running and track.residence == residence:
                self.holdings.publish(track, end)
        # Who ends first gives its blocks back first: the order is free, but what follows from it is not.
        order = {event.request_id: place for place, event in enumerate(events) if isinstance(event, Finished)}
        by_end = sorted(flight.samples, key=lambda track: order.get(track.request.request_id, len(order)))
        wanted += [event for track in by_end if (event := self._ended(track, now)) is not None]
        for track in self.live.values():
            if track.strikes and track.applied >= track.mark:
                track.strikes = track.mark = 0
                track.lone.clear()
        self._same(_in_kinds(events), _in_kinds(wanted))
        kinds = [_kind(event) for event in flat(events)]
        hold(kinds == sorted(kinds), "I10", "the end of a request comes after its tokens")

    def _ended(self, track: Track, now: float) -> Finished | None:
        if not track.alive or track.received < len(track.answer):
            return None
        request, last = track.request, track.answer[-1]
        self._end(track)
        self.tally.requests_finished += 1
        if last in request.sampling.stop_ids and track.received > request.sampling.min_tokens:
            reason = FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN
            return Finished(request.request_id, reason, last, track.record(now))
        hold(track.received == request.max_tokens, "I20", "the toy's answers end by a stop token or by length")
        return Finished(request.request_id, FinishReason.LENGTH, None, track.record(now))

    # --- after every call -------------------------------------------------------------------------------------------

    def settled(self, snapshot: CoreSnapshot) -> None:
        """What holds between two calls."""
        for name in _COUNTERS:
            if getattr(snapshot.counters, name) != getattr(self.tally, name):
                raise Breach(
                    "I21", f"{name} is {getattr(snapshot.counters, name)}, {getattr(self.tally, name)} counted"
                )
        hold(snapshot.requests_running == len(self.running), "I11", "who runs")
        hold(snapshot.requests_waiting == len(self.fresh) + len(self.resuming), "I11", "who waits")
        waiting = sum(len(t.request.prompt) + t.received for t in (*self.fresh, *self.resuming))
        hold(snapshot.tokens_waiting == waiting, "I12", "the tokens that wait")
        used, cached = self.holdings.num_used, self.holdings.num_cached
        hold(snapshot.blocks_used == used, "I1", "blocks are held by who has them in his table, and by nobody else")
        hold(snapshot.blocks_cached == cached, "I4", "free blocks that keep a prefix")
        hold(snapshot.steps_in_flight == len(self.flights), "I9", "plans without result")
        hold(snapshot.draining == self.draining, "I21", "draining is told")

    def next_moment(self, moment: float | None, now: float, planned_to_the_end: bool) -> None:
        """`next_deadline` gave `moment`, at `now`."""
        deadlines = [t.request.deadline for t in self.live.values() if t.request.deadline is not None]
        if deadlines:
            hold(moment is not None and moment <= min(deadlines), "I13", "no deadline is slept through")
        if planned_to_the_end:
            hold(moment is None or moment > now, "I13", "nobody is woken for what is past")
            idle = self.hello is not None and not self.flights and self.fresh
            if idle and self.limits.strategy != "fixed_size":
                due = min(t.arrival for t in self.fresh) + self.limits.policy.batch_timeout_seconds
                hold(moment is not None and moment <= due, "I13", "no batch timeout is slept through")
        if moment is not None and not deadlines:
            hold(bool(self.fresh), "I23", "no timer without somebody to wait for")

    def most_steps(self) -> int:
        """An upper bound of the steps in which all who live now must end, when nothing disturbs."""
        stays = 5 + max(1, self.limits.max_preemptions)  # three more as a suspect
        return sum(t.limit * stays for t in self.live.values()) + self.limits.pipeline_depth

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> type[LineclearError] | None:
        waiting = sum(len(t.tokens) for t in self.fresh)
        if self.draining:
            return Draining
        if request.request_id in self.live:
            return DuplicateRequest
        if len(self.fresh) >= self.limits.max_queue_size:
            return QueueFull
        if self.fresh and waiting + len(request.prompt) + len(request.output) > self.limits.max_queue_tokens:
            return QueueFull
        return self._misfit(request)

    def _misfit(self, request: Request) -> type[LineclearError] | None:
        if self.hello is None:
            return None
        total = len(request.prompt) + request.max_tokens
        if total > self.hello.max_model_len:
            return PromptTooLong
        # The last token is sampled but never computed.
        return CannotFit if total - 1 > self.hello.num_blocks * self.hello.block_size else None

    def _end(self, track: Track) -> None:
        hold(track.alive, "I10", "a request ends once")
        track.alive = False
        del self.live[track.request.request_id], self.by_number[track.number]
        if track.running:
            self._leave(track, track.applied)
        self.fresh.pop(track, None)
        self.resuming.pop(track, None)
        self.turns.ended(track, self.fresh, nobody_left=not self.live)

    def _leave(self, track: Track, high: int) -> None:
        self.holdings.leave(track)
        del self.running[track.slot]
        track.high = max(track.high, high)
        track.running, track.slot = False, -1
        track.planned = track.applied = track.shared = 0

    def _same(self, events: Iterable[Event], wanted: Sequence[object]) -> None:
        got = [(Failed, e.request_id, type(e.error), e.record) if isinstance(e, Failed) else e for e in events]
        if got != list(wanted):
            ends = (Finished, Failed)
            differ = [type(e).__name__ if not isinstance(e, tuple) else "Failed" for e in (*got, *wanted)]
            invariant = "I10" if any(name in str(differ) for name in ("Finished", "Failed")) and ends else "I7"
            raise Breach(invariant, f"events {got} instead of {list(wanted)}")


def _kind(event: Any) -> int:
    """Its place among the events of one result: tokens, failures, ends."""
    return 0 if isinstance(event, TokensReady) else 2 if isinstance(event, Finished) else 1


def _in_kinds(events: Iterable[Any]) -> list[Any]:
    """The events of one result, whose order says nothing from one request to another."""
    return sorted(flat(events), key=lambda e: (_kind(e), e[1] if type(e) is tuple else e.request_id))
