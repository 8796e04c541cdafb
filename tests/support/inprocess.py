"""The scheduler's core and a runner in one process, connected by the wire codec without sockets.

A step is launched as soon as the core plans it; its result is applied when the core has no further plan. The result
says that the step took a time that depends on its positions alone, so that a busy machine changes no plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path

from support.events import TokensReady, flat

from lineclear.model_files import adapter_files
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Event, Failed, Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import Counters
from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import Hello, Logprobs, StepPlan, StepResult
from lineclear.worker.loop.runner_interface import InflightStep, Runner


class Failure(AssertionError):
    """A request failed with the error in `args`."""


class InProcess:
    """A server without processes; `events` has all events in order."""

    def __init__(self, runner: Runner, limits: CoreLimits | None = None) -> None:
        self.core = Scheduler(limits or CoreLimits())
        self.events: list[Event] = []
        self.plans: list[StepPlan] = []
        self.runner = runner
        self._flights: deque[tuple[InflightStep, float]] = deque()
        self._clock = count()
        self._epochs = count(1)
        self._adapters: dict[bytes, Path] = {}
        self._join()

    @property
    def counters(self) -> Counters:
        return self.core.snapshot().counters

    def load_adapter(self, directory: Path) -> bytes:
        key = adapter_files.read(directory, 1024).key
        self.runner.load_adapter(self.core.load_adapter(key, next(self._clock)), key, str(directory))
        self._adapters[key] = directory
        return key

    def serve(self, requests: Iterable[Request], lose_worker_after_steps: int = 0) -> dict[str, list[int]]:
        """Run `requests` to their ends and return their output tokens. Raises Failure if a request fails.

        With `lose_worker_after_steps` the worker is lost once, after that many results, with plans in flight.
        """
        first = len(self.events)
        requests = list(requests)
        for request in requests:
            self.events += self.core.submit(request, next(self._clock))
        steps_left = lose_worker_after_steps or -1
        while self.core.num_live:
            self._plan()
            if steps_left == 0:
                self.lose_worker()
            else:
                self._apply()
            steps_left -= 1
            invariants.check(self.core)
        self._apply_rest()
        return {r.request_id: self._output(r.request_id, first, len(r.output)) for r in requests}

    def logprobs(self, request_id: str) -> list[Logprobs]:
        events = [e for e in self.events if isinstance(e, TokensReady) and e.request_id == request_id]
        return [entry for event in events for entry in event.logprobs]

    def finished(self, request_id: str) -> Finished:
        return next(e for e in reversed(self.events) if isinstance(e, Finished) and e.request_id == request_id)

    def lose_worker(self) -> None:
        """Lose the worker with its steps in flight and join it again, reset."""
        self._flights.clear()
        self.events += self.core.worker_lost(self._epoch, next(self._clock))
        self._join()

    def _join(self) -> None:
        self.runner.reset()
        self._epoch = next(self._epochs)
        hello = decode(encode(self.runner.hello(self._epoch)))
        assert isinstance(hello, Hello)
        self.events += self.core.worker_joined(hello, next(self._clock))
        for key, index in self.core.adapters.items():
            self.runner.load_adapter(index, key, str(self._adapters[key]))

    def _plan(self) -> None:
        while (plan := self.core.plan(self._epoch, next(self._clock))) is not None:
            received = decode(encode(plan))
            assert isinstance(received, StepPlan)
            self.plans.append(plan)
            self._flights.append((self.runner.launch(received), 1e-3 + 1e-5 * plan.num_tokens))
        self.events += self.core.drain_events()

    def _apply(self) -> None:
        assert self._flights, "requests wait and nothing can be planned"
        step, seconds = self._flights.popleft()
        result = decode(encode(step.result()))
        assert isinstance(result, StepResult)
        result = replace(result, step_seconds=seconds, draft_seconds=0.0)
        self.events += flat(self.core.apply(result, next(self._clock)))

    def _apply_rest(self) -> None:
        """Apply the steps planned after the ends of the requests."""
        while self._flights:
            self._apply()
        invariants.check(self.core)

    def _output(self, request_id: str, first: int, num_received: int = 0) -> list[int]:
        output: list[int] = []
        for event in self.events[first:]:
            if isinstance(event, Failed) and event.request_id == request_id:
                raise Failure(event.error)
            if isinstance(event, TokensReady) and event.request_id == request_id:
                assert event.first_index == num_received + len(output), "a gap or a repetition in the output"
                output += event.tokens
        return output
