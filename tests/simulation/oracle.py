"""What must be true of a scheduler, kept as a model of its own from what goes in and what comes out.

Nothing here reads the core's state, except `snapshot`, which is part of what comes out. Plans are judged by `plans`,
whose turn it is by `turns`, who holds which block by `holdings`; this file says what each call must answer: who is let
in, what a result brings, how each request ends, and that the figures are those of what happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from simulation.invariant_error import Breach, hold
from simulation.model_request import Track
from simulation.model_state import Crowd
from simulation.plan_checks import Plans
from simulation.scenario import Scenario, is_bad
from support.events import flat
from support.toy import expected, fingerprint

from lineclear.errors import (
    DeadlineExceeded,
    DeviceOutOfMemory,
    DuplicateRequest,
    InternalError,
    LineclearError,
    NonFiniteLogits,
    PoisonRequest,
    QueueFull,
    ServerDraining,
)
from lineclear.scheduler.core.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    TokensReady,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import CoreSnapshot, Counters
from lineclear.wire.messages import Hello, StepError, StepErrorKind, StepPlan, StepResult

_COUNTERS = [field.name for field in fields(Counters)]


class Oracle:
    """Follows every call and says what each must answer."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.limits = scenario, scenario.limits
        self.crowd = Crowd(scenario.limits)
        self.plans = Plans(self.crowd)

    # --- calls ------------------------------------------------------------------------------------------------------

    def submitted(self, request: Request, now: float, outcome: list[Event] | LineclearError) -> None:
        """`submit` gave `outcome`."""
        error = self._refusal(request)
        if error is not None:
            self.crowd.tally.requests_rejected += 1
            self.plans.joining.turned_away |= error is QueueFull
            hold(type(outcome) is error, "I12", "refused at the door, and for the right reason")
            return
        hold(outcome == [Admitted(request.request_id)], "I12", "admitted when nothing speaks against it")
        rank = self.crowd.turns.arrives(request, now)
        track = Track(request, request.sampling.seed, rank, now)
        track.pinned = self.limits.max_preemptions == 0
        self._foresee(track)
        self.crowd.enters(track)
        self.crowd.tally.requests_admitted += 1

    def cancelled(self, request_id: str, error: type[LineclearError], now: float, events: list[Event]) -> None:
        """`cancel` gave `events`."""
        track = self.crowd.live.get(request_id)
        if track is None:
            return hold(events == [], "I10", "nothing happens to an unknown request")
        self.crowd.end(track)
        self.crowd.tally.requests_cancelled += 1
        return self._same(events, [(Failed, request_id, error, track.record(now))])

    def stopped(self, request_id: str, num_tokens: int, now: float, events: list[Event]) -> None:
        """`finish` gave `events`."""
        track = self.crowd.live.get(request_id)
        if track is None:
            return hold(events == [], "I10", "nothing happens to an unknown request")
        self.crowd.end(track)
        self.crowd.tally.requests_finished += 1
        record = track.record(now, num_tokens)
        return self._same(events, [Finished(request_id, FinishReason.STOP_STRING, None, record)])

    def expired(self, now: float, events: list[Event]) -> None:
        """`expire` gave `events`."""
        due = [t for t in self.crowd.live.values() if t.request.deadline is not None and t.request.deadline <= now]
        wanted = []
        for track in sorted(due, key=lambda t: (t.request.deadline, t.rank[1])):
            self.crowd.end(track)
            self.crowd.tally.requests_expired += 1
            wanted.append((Failed, track.request.request_id, DeadlineExceeded, track.record(now)))
        self._same(events, wanted)

    def reset(self, hello: Hello | None, now: float, events: list[Event], loss: WorkerLoss = WorkerLoss.CLEAN) -> None:
        """`reset` gave `events`."""
        wanted: list[object] = [] if self.crowd.hello is None else [WorkerLost(self.crowd.hello.epoch)]
        lone = self.crowd.strike(self.crowd.flights) if loss is not WorkerLoss.CLEAN else None
        if lone is not None and lone.strikes > 1:
            lone.lone[loss] += 1
            crashes, kills = lone.lone[WorkerLoss.CRASHED], lone.lone[WorkerLoss.KILLED]
            if crashes / self.limits.max_isolated_crashes + kills / self.limits.max_isolated_kills >= 1.0:
                self.crowd.end(lone)
                self.crowd.tally.requests_failed += 1
                wanted.append((Failed, lone.request.request_id, PoisonRequest, lone.record(now)))
        self.crowd.works_for(hello)
        if hello is not None:
            wanted.append(WorkerJoined(hello.epoch))
            for track in list(self.crowd.live.values()):
                error = self.crowd.misfit(track.request, track.began_on)
                if error is None:
                    self._foresee(track)
                else:
                    self.crowd.end(track)
                    self.crowd.tally.requests_failed += 1
                    wanted.append((Failed, track.request.request_id, error, track.record(now)))
        self._same(events, wanted)

    def failed_step(self, error: StepError, now: float, events: list[Event]) -> None:
        """`fail_step` gave `events`."""
        wanted: list[object] = []
        if self.crowd.flights and error.kind is StepErrorKind.OUT_OF_MEMORY:
            rows = self.crowd.flights[0].rows
            if len(rows) > 1:
                self.plans.budget.halve()
                self.crowd.strike([self.crowd.flights[0]])
            elif rows[0][0].alive:
                track = rows[0][0]
                self.crowd.end(track)
                self.plans.budget.restore()
                self.crowd.tally.requests_failed += 1
                wanted.append((Failed, track.request.request_id, DeviceOutOfMemory, track.record(now)))
        self._same(events, wanted)

    def drained(self) -> None:
        """`drain` was called."""
        self.crowd.draining = True

    def forgot(self) -> None:
        """`forget_prefixes` was called."""
        self.crowd.holdings.forget()

    def planned(self, plan: StepPlan | None, now: float, events: list[Event]) -> None:
        """`plan` gave `plan`, and `take_events` then `events`."""
        self.plans.planned(plan, now, events)

    # --- a result ---------------------------------------------------------------------------------------------------

    def applied(self, result: StepResult, now: float, events: list[Event]) -> None:
        """`apply` took in `result` and gave `events`."""
        flight = self.crowd.flights.popleft()
        hold(result.step == flight.step, "I9", "results in the order of plans")
        wanted: list[object] = []
        for index, (track, token) in enumerate(zip(flight.samples, result.tokens, strict=True)):
            track.in_flight -= 1
            if not track.alive:
                self.crowd.tally.wasted_samples += 1
                continue
            bad = index in result.bad_rows
            request_id = track.request.request_id
            if not bad:
                context = (*track.request.prompt, *track.answer[: track.received])
                hold(not is_bad(context, self.scenario.bad_per_mille), "I20", "bad logits are found")
            if bad or not 0 <= token < self.scenario.vocab_size:
                self.crowd.holdings.soil(track)
                self.crowd.end(track)
                self.crowd.tally.requests_failed += 1
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
            self.crowd.tally.output_tokens += 1
        soiled = {t for i, t in enumerate(flight.samples) if i in result.bad_rows}
        tokens = enumerate(result.tokens)
        soiled |= {flight.samples[i] for i, token in tokens if not 0 <= token < self.scenario.vocab_size}
        self.crowd.holdings.settle(flight.step, soiled)
        for track, residence, end in flight.rows:
            if track.running and track.residence == residence:
                self.crowd.holdings.publish(track, end)
        # Who ends first gives its blocks back first: the order is free, but what follows from it is not.
        order = {event.request_id: place for place, event in enumerate(events) if isinstance(event, Finished)}
        by_end = sorted(flight.samples, key=lambda track: order.get(track.request.request_id, len(order)))
        wanted += [event for track in by_end if (event := self._ended(track, now)) is not None]
        for track in self.crowd.live.values():
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
        self.crowd.end(track)
        self.crowd.tally.requests_finished += 1
        if last in request.sampling.stop_ids and track.received > request.sampling.min_tokens:
            reason = FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN
            return Finished(request.request_id, reason, last, track.record(now))
        hold(track.received == request.max_tokens, "I20", "the toy's answers end by a stop token or by length")
        return Finished(request.request_id, FinishReason.LENGTH, None, track.record(now))

    # --- after every call -------------------------------------------------------------------------------------------

    def settled(self, snapshot: CoreSnapshot) -> None:
        """What holds between two calls."""
        for name in _COUNTERS:
            told, counted = getattr(snapshot.counters, name), getattr(self.crowd.tally, name)
            hold(told == counted, "I21", f"{name} is {told}, {counted} counted")
        hold(snapshot.requests_running == len(self.crowd.running), "I11", "who runs")
        hold(snapshot.requests_waiting == len(self.crowd.fresh) + len(self.crowd.resuming), "I11", "who waits")
        waiting = sum(len(t.request.prompt) + t.received for t in (*self.crowd.fresh, *self.crowd.resuming))
        hold(snapshot.tokens_waiting == waiting, "I12", "the tokens that wait")
        used, cached = self.crowd.holdings.num_used, self.crowd.holdings.num_cached
        hold(snapshot.blocks_used == used, "I1", "blocks are held by who has them in his table, and by nobody else")
        hold(snapshot.blocks_cached == cached, "I4", "free blocks that keep a prefix")
        hold(snapshot.steps_in_flight == len(self.crowd.flights), "I9", "plans without result")
        hold(snapshot.draining == self.crowd.draining, "I21", "draining is told")

    def next_moment(self, moment: float | None, now: float, planned_to_the_end: bool) -> None:
        """`next_deadline` gave `moment`, at `now`."""
        deadlines = [t.request.deadline for t in self.crowd.live.values() if t.request.deadline is not None]
        if deadlines:
            hold(moment is not None and moment <= min(deadlines), "I13", "no deadline is slept through")
        if planned_to_the_end:
            hold(moment is None or moment > now, "I13", "nobody is woken for what is past")
            idle = self.crowd.hello is not None and not self.crowd.flights and self.crowd.fresh
            if idle and self.limits.batching_strategy != "fixed_size":
                due = min(t.arrival for t in self.crowd.fresh) + self.limits.policy.batch_timeout_seconds
                hold(moment is not None and moment <= due, "I13", "no batch timeout is slept through")
        if moment is not None and not deadlines:
            hold(bool(self.crowd.fresh), "I23", "no timer without somebody to wait for")

    def most_steps(self) -> int:
        """An upper bound of the steps in which all who live now must end, when nothing disturbs."""
        stays = 5 + max(1, self.limits.max_preemptions)  # three more as a suspect
        return sum(t.limit * stays for t in self.crowd.live.values()) + self.limits.pipeline_depth

    def _foresee(self, track: Track) -> None:
        """The answer that it must get: all of it from the model that it names, or began on, or will begin on."""
        request, hello = track.request, self.crowd.hello
        model = request.model_fingerprint or track.began_on or ("" if hello is None else hello.model_fingerprint)
        sizes = request.max_tokens, self.scenario.vocab_size
        track.answer = expected(request.prompt, request.sampling, *sizes, model.removeprefix(fingerprint("")))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> type[LineclearError] | None:
        waiting = sum(len(t.tokens) for t in self.crowd.fresh)
        if self.crowd.draining:
            return ServerDraining
        if request.request_id in self.crowd.live:
            return DuplicateRequest
        if len(self.crowd.fresh) >= self.limits.max_queue_size:
            return QueueFull
        if self.crowd.fresh and waiting + len(request.prompt) + len(request.output) > self.limits.max_queue_tokens:
            return QueueFull
        return self.crowd.misfit(request)

    def _same(self, events: Iterable[Event], wanted: Sequence[object]) -> None:
        got = [(Failed, e.request_id, type(e.error), e.record) if isinstance(e, Failed) else e for e in events]
        if got != list(wanted):
            is_end = any(isinstance(event, Finished | tuple) for event in (*got, *wanted))
            invariant = "I10" if is_end else "I7"
            raise Breach(invariant, f"events {got} instead of {list(wanted)}")


def _kind(event: Any) -> int:
    """Its place among the events of one result: tokens, failures, ends."""
    return 0 if isinstance(event, TokensReady) else 2 if isinstance(event, Finished) else 1


def _in_kinds(events: Iterable[Any]) -> list[Any]:
    """The events of one result, whose order says nothing from one request to another."""
    return sorted(flat(events), key=lambda e: (_kind(e), e[1] if type(e) is tuple else e.request_id))
