"""Measures order and admission with the scheduler core on a virtual clock: tenants, estimated lengths, waits.

    python -m bench.admission [--seconds 600]

Eight slots; a step takes 10 ms and 0.2 ms for each token. Requests have hidden lengths and `max_tokens` 512.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bench.figures import Figure, main
from bench.instant import InstantRunner
from bench.measure import percentile
from lineclear.scheduler.core.events import Admitted, Finished, Started, StepTokens
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.expected_length import AnswerShape, DeclaredLength, LearnedLength, OutputLengths
from lineclear.wire.messages import Sampling

SLOTS, MAX_TOKENS, PROMPT = 8, 512, 32
STEP_SECONDS, TOKEN_SECONDS = 0.010, 0.0002
MEAN_LENGTHS = {"short": 8, "middle": 40, "long": 160, "longest": 400}
"""Tenants with answers of very different lengths, as chat, tool calls and summaries."""


@dataclass
class Arrival:
    """A request of the workload. `length` is hidden from the scheduler."""

    at: float
    tenant: str
    length: int


@dataclass
class Outcome:
    """What happened to a request, in seconds of the virtual clock."""

    arrival: Arrival
    predicted: float | None = None
    started: float = math.nan
    first_token: float = math.nan
    ended: float = math.nan


class VirtualServer:
    """A core with one worker whose steps take virtual time. `estimator`: none, learned or exact."""

    def __init__(self, policy: str, estimator: str) -> None:
        self.core = Scheduler(
            CoreLimits(max_batch_size=SLOTS, scheduling_policy=policy, pipeline_depth=1, max_queue_size=1 << 20)
        )
        self.runner = InstantRunner(SLOTS)
        self.core.worker_joined(self.runner.hello(1), 0.0)
        self.lengths = OutputLengths(LearnedLength() if estimator == "learned" else DeclaredLength())
        self.is_exact = estimator == "exact"
        self.now = 0.0
        self.outcomes: dict[str, Outcome] = {}
        self.served: Counter[str] = Counter()

    def submit(self, arrival: Arrival) -> None:
        """Queue a request; `arrival.at` is in the past or now."""
        name = f"r{len(self.outcomes)}"
        shape = AnswerShape(arrival.tenant, PROMPT, MAX_TOKENS, arrival.length if self.is_exact else 0)
        number = len(self.outcomes)
        request = Request(
            name,
            (number & 0xFFFF, number >> 16, *range(PROMPT - 2)),
            Sampling(),
            MAX_TOKENS,
            tenant=arrival.tenant,
            expected_tokens=self.lengths.expect(shape, 0),
            wants_position=True,
        )
        outcome = self.outcomes[name] = Outcome(arrival)
        for event in self.core.submit(request, self.now):
            if isinstance(event, Admitted) and event.position is not None:
                outcome.predicted = event.position.seconds

    def step(self) -> list[Outcome] | None:
        """Run one step; return the requests that ended. None if nothing can run."""
        plan = self.core.plan(1, self.now)
        if plan is None:
            return None
        for event in self.core.drain_events():
            if isinstance(event, Started):
                self.outcomes[event.request_id].started = self.now
        self.now += STEP_SECONDS + TOKEN_SECONDS * sum(row.num_tokens for row in plan.rows)
        ended = []
        for event in self.core.apply(self.runner.launch(plan).result(), self.now):
            if isinstance(event, StepTokens):
                for request_id, index in zip(event.request_ids, event.indices, strict=True):
                    outcome = self.outcomes[request_id]
                    self.served[outcome.arrival.tenant] += 1 if index else 1 + PROMPT
                    if index == 0:
                        outcome.first_token = self.now
                    if index + 1 == outcome.arrival.length:
                        finished = self.core.finish_at_stop_string(request_id, index + 1, self.now)
                        ended += [self._end(end) for end in finished if isinstance(end, Finished)]
            elif isinstance(event, Finished):
                ended.append(self._end(event))
        return ended

    def _end(self, event: Finished) -> Outcome:
        outcome = self.outcomes[event.request_id]
        outcome.ended = self.now
        self.lengths.learn(AnswerShape(outcome.arrival.tenant, PROMPT, MAX_TOKENS), outcome.arrival.length)
        return outcome

    def run(self, arrivals: list[Arrival]) -> list[Outcome]:
        """Run an open workload to the end of all requests."""
        waiting = sorted(arrivals, key=lambda arrival: arrival.at, reverse=True)
        while waiting or self.core.num_live:
            while waiting and waiting[-1].at <= self.now:
                self.submit(waiting.pop())
            if self.step() is None and waiting:
                self.now = max(self.now, waiting[-1].at)
        return list(self.outcomes.values())


def poisson(rng: random.Random, tenant: str, rate: float, seconds: float, mean_length: float) -> list[Arrival]:
    """Return arrivals of one tenant with lengths of a log-normal distribution."""
    found, now = [], rng.expovariate(rate)
    while now < seconds:
        length = round(rng.lognormvariate(math.log(mean_length) - 0.125, 0.5))
        found.append(Arrival(now, tenant, min(max(length, 1), MAX_TOKENS)))
        now += rng.expovariate(rate)
    return found


def capacity() -> float:
    """Return generated tokens per second with all slots in use."""
    return SLOTS / (STEP_SECONDS + SLOTS * TOKEN_SECONDS)


def slowdown(seconds: float) -> Iterator[Figure]:
    """Tenant `a` sends 20 times the requests of `b`, together 1.3 times what the server can do."""
    length = 40
    rate = 1.3 * capacity() / (length + 8) / 21  # a prompt costs about as much as eight tokens
    rng = random.Random(1)
    light = poisson(rng, "b", rate, seconds, length)
    heavy = poisson(rng, "a", 20 * rate, seconds, length)
    alone = _latencies(VirtualServer("fifo", "learned").run(light), "b")
    for policy in ("fifo", "fair"):
        both = _latencies(VirtualServer(policy, "learned").run([*light, *heavy]), "b")
        ratio = sum(both) / sum(alone)
        yield Figure("slowdown of the light tenant", policy, ratio, "x, mean latency against alone")
        yield Figure("p99 latency of the light tenant", policy, percentile(both, 0.99), "s")
    yield Figure("p99 latency of the light tenant", "alone", percentile(alone, 0.99), "s")


def _latencies(outcomes: list[Outcome], tenant: str) -> list[float]:
    return [o.ended - o.arrival.at for o in outcomes if o.arrival.tenant == tenant]


def index(seconds: float) -> Iterator[Figure]:
    """Tenant `a` keeps 160 requests outstanding, `b` keeps 8: both always wait."""
    for policy in ("fifo", "fair"):
        rng, server = random.Random(2), VirtualServer(policy, "learned")

        def ask(tenant: str, server: VirtualServer = server, rng: random.Random = rng) -> None:
            server.submit(Arrival(server.now, tenant, rng.randint(20, 60)))

        for tenant, count in (("a", 160), ("b", 8)):
            for _ in range(count):
                ask(tenant)
        warm = False
        while server.now < 2 * seconds:
            if not warm and server.now >= seconds:  # the first requests are charged with max_tokens
                server.served.clear()
                warm = True
            for outcome in server.step() or ():
                ask(outcome.arrival.tenant)
        served = list(server.served.values())
        jain = sum(served) ** 2 / (len(served) * sum(tokens**2 for tokens in served))
        yield Figure("Jain's index of served tokens", policy, jain, "of 1")


def first_tokens(seconds: float) -> Iterator[Figure]:
    """`shortest` with skewed lengths at a load of 0.95: time to the first token by estimator."""
    rng = random.Random(3)
    share = 0.95 * capacity() / sum(length + 8 for length in MEAN_LENGTHS.values())
    arrivals = [a for t, mean in MEAN_LENGTHS.items() for a in poisson(rng, t, share, seconds, mean)]
    for policy, estimator in (("fifo", "none"), ("shortest", "none"), ("shortest", "learned"), ("shortest", "exact")):
        outcomes = VirtualServer(policy, estimator).run(arrivals)
        times = [o.first_token - o.arrival.at for o in outcomes]
        case = f"{policy}, {estimator}"
        yield Figure("mean time to first token", case, sum(times) / len(times), "s")
        yield Figure("p99 time to first token", case, percentile(times, 0.99), "s")


def waits(seconds: float) -> Iterator[Figure]:
    """Predicted against actual waits of the requests that wait at least half a second, at a load of 0.95."""
    rng = random.Random(4)
    share = 0.95 * capacity() / sum(length + 8 for length in MEAN_LENGTHS.values())
    arrivals = [a for t, mean in MEAN_LENGTHS.items() for a in poisson(rng, t, share, seconds, mean)]
    for policy in ("fifo", "shortest", "fair"):
        for estimator in ("none", "learned", "exact"):
            outcomes = VirtualServer(policy, estimator).run(arrivals)
            known = [(o.predicted, o.started - o.arrival.at) for o in outcomes if o.predicted is not None]
            errors = [abs(predicted - wait) / wait for predicted, wait in known if wait >= 0.5]
            case = f"{policy}, {estimator}, {len(errors)} requests"
            yield Figure("median error of the predicted wait", case, 100 * (percentile(errors, 0.5) or 0.0), "%")
            bias = sum(predicted - wait for predicted, wait in known) / sum(wait for _, wait in known)
            yield Figure("bias of the predicted wait", case, 100 * bias, "%")


def make(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield every figure."""
    for part in (slowdown, index, first_tokens, waits):
        yield from part(options.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual seconds of arrivals")
    raise SystemExit(main(make, parser))
