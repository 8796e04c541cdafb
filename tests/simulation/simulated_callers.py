"""The callers of a simulated core: requests with grammars, with several outputs, and beam searches.

They run the product's own GrammarPreparation, BestOf and Beams over simulated workers and streams. Events reach
them later than the core's next calls, as on the event loop of the server.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from simulation.checked_scheduler import CheckedScheduler
from simulation.invariant_error import require
from simulation.model_worker import Worker
from simulation.scenario import Scenario, draw_siblings
from simulation.simulated_streams import SimulatedOutput, SimulatedStream
from support.mask_threads import LateThreads
from support.toy import fingerprint, sample, with_adapter

from lineclear.errors import Cancelled, LineclearError
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.grammar_preparation import MAX_SENT, GrammarPreparation
from lineclear.scheduler.engine.worker_session import Joined, Lost
from lineclear.scheduler.requests.answer.answer import BestOf
from lineclear.scheduler.requests.answer.beams import Beams
from lineclear.scheduler.requests.beam_search import BeamSearch, BeamSettings, EarlyStopping
from lineclear.wire.messages import Heartbeat, PrepareGrammar, Sampling, StepPlan, StepResult


@dataclass(slots=True)
class _Branches:
    """A request with several outputs."""

    request_ids: Sequence[str]
    group: BestOf | Beams | None = None
    outputs: Sequence[SimulatedOutput] = ()
    settings: BeamSettings | None = None
    prompt: tuple[int, ...] = ()
    sampling: Sampling | None = None
    adapter: bytes = b""
    streams: list[SimulatedStream] = field(default_factory=list)
    is_over: bool = False


class Callers:
    """Draws from a random stream of its own, and only in scenarios with grammars or several outputs."""

    def __init__(self, scenario: Scenario, scheduler: CheckedScheduler, workers: dict[int, Worker]) -> None:
        self._scenario, self._scheduler, self._workers = scenario, scheduler, workers
        self._rng = random.Random(f"{scenario.seed}:callers")
        self._now = 0.0
        self.is_prompt = False
        """Whether events are handled at once; otherwise some time later."""
        self._preparation = GrammarPreparation(cast(Any, self), cast(Any, self))
        self._waiting: dict[int, set[int]] = {}  # epochs that compile the grammar of a request, by its seed
        self._branches: list[_Branches] = []
        self._streams: dict[str, SimulatedStream] = {}
        self._events: deque[Any] = deque()
        self._calls: deque[Callable[[], object]] = deque()  # of the event loop, for the engine's thread
        self._num_streams = 0
        scheduler.on_event = self._on_event

    # --- plain requests and grammars --------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Submit a request, or have its grammar compiled first."""
        self._now = now
        self._prepare(request, lambda: self._scheduler.submit(request, self._now))

    def _prepare(self, request: Request, submit: Callable[[], object]) -> None:
        grammar = request.sampling.grammar
        if not grammar:
            submit()
            return
        seed = request.sampling.seed
        self._waiting[seed] = {e for e, worker in self._workers.items() if not worker.is_cut_off}
        self._preparation.prepare(grammar, partial(self._on_prepared, seed, grammar, submit), self._now)

    def _on_prepared(self, seed: int, grammar: str, submit: Callable[[], object]) -> None:
        for epoch in self._waiting.pop(seed) & self._workers.keys():
            is_compiled = grammar in self._workers[epoch].prepared
            require(is_compiled, "I29", "a request waits until each joined worker has compiled its grammar")
        submit()

    @property
    def joined(self) -> list[Any]:
        """The joined workers, for GrammarPreparation."""
        return [worker.hello for worker in self._workers.values()]

    def send_control(self, message: PrepareGrammar) -> bool:
        """Send a worker a grammar, for GrammarPreparation."""
        worker = self._workers.get(message.epoch)
        if worker is None or worker.is_cut_off:
            return False
        worker.preparing[message.number] = message.grammar
        require(len(worker.preparing) <= MAX_SENT, "I29", "a worker has few grammars to compile at a time")
        return True

    def on_join(self, worker: Worker) -> None:
        """Send a worker that joined the recent grammars."""
        self._preparation.worker_joined(Joined(worker.hello), self._now)

    def on_loss(self, worker: Worker) -> None:
        """Wait no longer for the grammars of a worker that is lost."""
        self._preparation.worker_lost(Lost(worker.hello, "", WorkerLoss.CLEAN, False, False), self._now)

    def compile(self, worker: Worker | None = None) -> None:
        """Have a worker compile a grammar and answer with its next heartbeat."""
        found = [worker for worker in self._workers.values() if worker.preparing and not worker.is_cut_off]
        if worker is None and found:
            worker = self._rng.choice(found)
        if worker is not None:
            number = self._rng.choice(list(worker.preparing))
            worker.prepared.add(worker.preparing.pop(number))
            self._preparation.answered(Heartbeat(worker.hello.epoch, 0, prepared=(number,)), self._now)

    def check_grammars(self, worker: Worker, plan: StepPlan) -> None:
        """Check that a worker was sent the grammars of the requests that it starts."""
        known = worker.prepared | {*worker.preparing.values()}
        for init in plan.inits:
            is_known = not init.sampling.grammar or init.sampling.grammar in known or len(worker.preparing) >= MAX_SENT
            require(is_known, "I29", "a worker is sent a grammar before a request with it")

    def spoil(self, result: StepResult) -> StepResult | None:
        """Return an invalid result of the kind that only requests with grammars have; mostly None."""
        if not self._scenario.constrained or self._rng.random() < 0.5:
            return None
        name = self._rng.choice(("stuck_rows", "deferred_rows"))
        return replace(result, **{name: frozenset({result.num_outputs})})

    # --- several outputs --------------------------------------------------------------------------------------------

    def draw_outputs(self) -> int:
        """Return the number of outputs of the next request that has several."""
        return self._rng.choice((2, 3, 4, 8))

    def branch(self, first: Request, numbers: Sequence[int], model: str, now: float) -> None:
        """Submit a request with an output for each number, a beam search, or a part of a Score or Embed."""
        self._now = now
        if first.pooling is not None or not first.max_tokens:
            self.submit(replace(first, is_sibling=numbers[0] % 3 > 0), now)
        elif self._rng.random() < self._scenario.beams:
            self._search(first, numbers)
        else:
            requests = draw_siblings(self._rng, self._scenario, first, numbers, model)
            self._prepare(first, partial(self._submit_outputs, requests))

    def _submit_outputs(self, requests: Sequence[Request]) -> None:
        chooses = len(requests) > 2 and not any(r.output or r.scoring for r in requests) and self._rng.random() < 0.5
        if chooses:
            requests = [replace(r, sampling=replace(r.sampling, logprobs=0)) for r in requests]
        branches = _Branches([request.request_id for request in requests])
        if chooses:
            branches.outputs = [SimulatedOutput(), SimulatedOutput()]
            branches.streams = [self._open(request.request_id) for request in requests]
            validated = SimpleNamespace(sampling=requests[0].sampling)
            streams = cast(Any, (branches.outputs, branches.streams))
            branches.group = BestOf(cast(Any, None), cast(Any, validated), *streams)
        self._branches.append(branches)
        if self._submit(*requests):
            self._scheduler.counts["several outputs"] += 1

    def _search(self, first: Request, numbers: Sequence[int]) -> None:
        rng, vocab_size = self._rng, self._scenario.vocab_size
        end_ids = frozenset({0}) if rng.random() < 0.6 else frozenset[int]()
        most = min(first.max_tokens, 10)
        stopping = rng.choice(tuple(EarlyStopping))
        settings = BeamSettings(
            len(numbers), most, end_ids, rng.choice((0.0, 1.0)), stopping, rng.choice((0, 0, 2)), vocab_size
        )
        most_likely = min(settings.num_top, vocab_size)
        branches = _Branches([], settings=settings, prompt=first.prompt, adapter=first.adapter)
        branches.sampling = sampling = Sampling(seed=numbers[0], logprobs=most_likely)
        branches.outputs = [SimulatedOutput() for _ in range(2)]

        def open_stream(*arguments: object, **more: object) -> SimulatedStream:
            self._num_streams += 1
            branches.streams.append(self._open(f"b{self._num_streams}"))
            return branches.streams[-1]

        def close_stream(stream: SimulatedStream, error: LineclearError | None) -> None:
            self._streams.pop(stream.engine_id, None)

        services = SimpleNamespace(
            streams=SimpleNamespace(open=open_stream, close=close_stream),
            engine=SimpleNamespace(
                submit=lambda *steps: self._call_submit(*(replace(r, sampling=sampling) for r in steps))
            ),
            clock=lambda: self._now,
        )
        validated = SimpleNamespace(beams=settings, sampling=Sampling(), request_id="")
        group = Beams(
            cast(Any, services), cast(Any, validated), cast(Any, branches.outputs), [cast(Any, open_stream())]
        )
        branches.group = group
        self._branches.append(branches)
        self._scheduler.counts["beam searches"] += 1
        own = {"stop_ids": frozenset(), "output": (), "scoring": None, "max_tokens": most}
        group.start({entry.name: getattr(first, entry.name) for entry in fields(Request)} | own)

    def _open(self, request_id: str) -> SimulatedStream:
        def cancel(error: LineclearError) -> None:
            # Not with `error`: the oracle checks that no request is blamed for the crash of another.
            self._calls.append(lambda: self._scheduler.cancel(request_id, None, self._now))

        stream = self._streams[request_id] = SimulatedStream(request_id, cancel)
        return stream

    def _call_submit(self, *requests: Request) -> None:
        self._calls.append(lambda: self._submit(*requests))

    def _submit(self, *requests: Request) -> bool:
        error = self._scheduler.submit_together(requests, self._now)
        for request in requests if error is not None else ():
            if (stream := self._streams.get(request.request_id)) is not None:
                stream.fail(error)
        return error is None

    def disconnect(self, now: float) -> None:
        self._now = now
        if self._branches:
            self._cancel(self._rng.choice(self._branches))

    def _cancel(self, branches: _Branches) -> None:
        if branches.group is not None:
            branches.group.cancel(Cancelled("the caller disconnected"))
        for request_id in branches.request_ids:
            self._scheduler.cancel(request_id, None, self._now)
        branches.is_over = True

    # --- the event loop ---------------------------------------------------------------------------------------------

    def _on_event(self, event: Any) -> None:
        if getattr(event, "request_id", None) in self._streams:
            self._events.append(event)

    def run(self, now: float) -> None:
        """Handle what has happened, now or some time later, and the calls that follow from it."""
        self._now = now
        if self._preparation.unsent:
            self._preparation.send(now)
        while self.is_prompt and any(worker.preparing for worker in self._workers.values()):
            self.compile()
        while (self._events or self._calls) and (self.is_prompt or self._rng.random() < 0.7):
            for event in [self._events.popleft() for _ in range(len(self._events))]:
                if (stream := self._streams.get(event.request_id)) is not None:
                    stream.deliver(event)
            for call in [self._calls.popleft() for _ in range(len(self._calls))]:
                call()
        for branches in self._branches:
            self._check_outputs(branches)
        self._branches = [branches for branches in self._branches if not branches.is_over]

    @property
    def has_calls(self) -> bool:
        return bool(self._events or self._calls)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its grammar, or a group for its next step."""
        return bool(self._waiting) or self.has_calls

    def max_steps(self) -> int:
        """Return an upper bound of the steps until all requests end without faults."""
        oracle = self._scheduler.oracle
        if oracle is None:
            return 10**9
        steps = oracle.max_steps() + 5000 * (len(self._branches) + len(self._waiting))
        if self._scenario.late_per_mille:  # a deferred row is planned again behind the results of all rows in flight
            steps *= 1 + LateThreads.MAX_TRIES * self._scenario.limits.pipeline_depth
        return steps

    def stop(self, now: float) -> None:
        """Cancel all requests with several outputs; requests that wait for a grammar are not submitted."""
        self._now = now
        for branches in self._branches:
            self._cancel(branches)
        self._branches.clear()
        self._waiting.clear()
        self._preparation = GrammarPreparation(cast(Any, self), cast(Any, self))
        self._calls.clear()
        self._events.clear()
        self._streams.clear()

    def _check_outputs(self, branches: _Branches) -> None:
        """Check the outputs that a group has chosen."""
        is_live = any(request_id in self._scheduler.live for request_id in branches.request_ids)
        is_over = any(output.error for output in branches.outputs)
        delivered = [output for output in branches.outputs if output.tokens is not None]
        if is_over:
            is_live = any(stream.engine_id in self._scheduler.live for stream in branches.streams)
            require(not is_live or bool(self._calls), "I28", "the requests of a failed group end")
        branches.is_over |= is_over or bool(delivered) or (not branches.outputs and not is_live)
        if not delivered or branches.settings is None:
            return
        model = with_adapter(delivered[0].model.removeprefix(fingerprint("")), branches.adapter)
        right = self._reference(branches, model)
        for output, beam in zip(delivered, right.finished, strict=False):
            require(output.tokens == beam.tokens, "I20", "a beam search finds the beams of a search alone")
            require(output.score == beam.score, "I20", "a beam has the score of a search alone")
        self._scheduler.counts["beam results"] += 1

    def _reference(self, branches: _Branches, model: str) -> BeamSearch:
        """Return the search done on the model alone."""
        settings, sampling, prompt = branches.settings, branches.sampling, branches.prompt
        assert settings is not None
        assert sampling is not None
        search = BeamSearch(settings)
        while not search.is_done:
            steps = [
                sample((*prompt, *beam.tokens), sampling, len(prompt), self._scenario.vocab_size, model)[1]
                for beam in search.running
            ]
            search.advance([step for step in steps if step is not None])
        return search
