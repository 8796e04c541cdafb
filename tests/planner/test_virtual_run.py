"""The planner's clock: times by hand, the schedule of a real engine and worker, losses, prefixes, stop tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support.engine_harness import EngineHarness
from support.toy_worker import ToyOptions

from lineclear.planner.arrivals import Arrival, PoissonTraffic, parse_length
from lineclear.planner.step_timing import StepTiming, WorkerCapacity
from lineclear.planner.virtual_run import Outcome, VirtualRun
from lineclear.scheduler.core.events import Failed, Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.policies import QUEUE_ORDERS, STRATEGIES, PolicySettings
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling

UNBOUNDED = PolicySettings(target_inter_token_latency_seconds=0.0)
"""Plans then do not depend on measured times."""
CHOICES = {*((strategy, "fifo") for strategy in STRATEGIES), *(("continuous", policy) for policy in QUEUE_ORDERS)}
TIMING = StepTiming(0.010, 0.001, 0.0)


def simulate(arrivals: list[Arrival], timing: StepTiming = TIMING, workers: int = 1, **limits: Any) -> Outcome:
    core = CoreLimits(**{"policy": UNBOUNDED, "pipeline_depth": 1} | limits)
    return VirtualRun(core, timing, workers, 600.0).run(arrivals)


def test_times_of_one_request_follow_from_its_steps() -> None:
    out = simulate([Arrival(5.0, 20, 4)])
    assert out.time_to_first_token.mean == pytest.approx(0.030)
    assert (out.inter_token_latency.count, out.inter_token_latency.mean) == (3, pytest.approx(0.011))
    assert out.request_seconds.mean == out.seconds == pytest.approx(0.030 + 3 * 0.011)
    assert (out.steps, out.output_tokens, out.prompt_tokens) == (4, 4, 20)
    assert out.worker_use == pytest.approx(1.0)


def test_gap_and_latency_are_added_between_steps() -> None:
    timing = replace(TIMING, gap_seconds=0.002, latency_seconds=0.005)
    out = simulate([Arrival(0.0, 20, 4)], timing)
    assert out.seconds == pytest.approx(0.030 + 3 * 0.011 + 4 * 0.005)  # at depth 1 each plan reaches an idle worker
    out = simulate([Arrival(0.0, 20, 4)], timing, pipeline_depth=2)
    assert out.seconds == pytest.approx(0.005 + 0.030 + 3 * 0.011 + 3 * 0.002)
    short = replace(timing, base_seconds=0.0, seconds_per_token=0.0001)
    out = simulate([Arrival(0.0, 20, 4)], short, pipeline_depth=2)
    assert out.seconds == pytest.approx(0.005 + 0.002 + 3 * (0.0001 + 0.002)), "a busy worker has the next plan already"


def test_gap_of_tokens_that_share_steps_with_a_prompt() -> None:
    """The second prompt, 10 tokens, is computed beside the second token of the first request."""
    out = simulate([Arrival(0.0, 10, 3), Arrival(0.015, 10, 1)])
    assert out.time_to_first_token.mean == pytest.approx((0.020 + 0.041 - 0.015) / 2)
    assert out.inter_token_latency.count == 2
    assert out.inter_token_latency.mean == pytest.approx((0.021 + 0.011) / 2)


def test_gap_spans_a_preemption() -> None:
    timing = replace(TIMING, worker=WorkerCapacity(num_blocks=6, block_size=4))
    ends: dict[str, Any] = {}
    run = VirtualRun(CoreLimits(policy=UNBOUNDED, pipeline_depth=1), timing, 1, 600.0)
    out = run.run([Arrival(0.0, 6, 12), Arrival(0.001, 6, 12)], on_end=lambda e: ends.update({e.request_id: e.stats}))
    assert out.preemptions == ends["1"].preemptions > 0
    gaps = [ends[name].last_token_at - ends[name].first_token_at for name in "01"]
    assert out.inter_token_latency.count == 22
    assert out.inter_token_latency.mean == pytest.approx(sum(gaps) / 22)


@pytest.mark.parametrize(("strategy", "policy"), sorted(CHOICES))
def test_every_gap_is_counted(strategy: str, policy: str) -> None:
    """Sums of gaps equal the times between first and last tokens, whatever the batches were."""
    traffic = PoissonTraffic(150, parse_length("uniform:1:40"), parse_length("uniform:1:30"), seed=3)
    spans = []

    def end(event: Finished | Failed) -> None:
        assert isinstance(event, Finished)
        assert event.stats.first_token_at is not None
        assert event.stats.last_token_at is not None
        spans.append((event.stats.completion_tokens - 1, event.stats.last_token_at - event.stats.first_token_at))

    limits = CoreLimits(
        batching_strategy=strategy,
        scheduling_policy=policy,
        max_batch_size=8,
        policy=PolicySettings(fixed_size_timeout_seconds=0.1),
    )
    timing = replace(TIMING, worker=WorkerCapacity(num_blocks=40, block_size=4, max_step_tokens=16))
    out = VirtualRun(limits, timing, 2, 600.0).run(traffic.at(40.0), on_end=end)
    assert (out.finished, len(spans)) == (150, 150)
    assert out.inter_token_latency.count == sum(count for count, _ in spans)
    total = out.inter_token_latency.mean * out.inter_token_latency.count
    assert total == pytest.approx(sum(seconds for _, seconds in spans))


@pytest.mark.parametrize("max_batch_size", [4, 16])
def test_schedule_is_that_of_a_real_engine_and_worker(max_batch_size: int) -> None:
    """Requests that wait for the worker: its steps, preemptions and ends are those of the simulation."""
    chance = random.Random(max_batch_size)
    lengths = [(chance.randint(1, 60), chance.randint(1, 60)) for _ in range(40)]
    options = ToyOptions(num_blocks=100, block_size=4, num_slots=64, max_model_len=512, min_step_seconds=0.001)
    # With two steps in flight, the engine may receive two results before it plans.
    limits = CoreLimits(max_batch_size=max_batch_size, target_batch_tokens=64, pipeline_depth=1, policy=UNBOUNDED)
    with EngineHarness(options=options, core=limits) as harness:
        streams = []
        for number, (prompt, output) in enumerate(lengths):
            # No two prompts begin alike, as in the simulation: otherwise a request copies the equal positions.
            tokens = (number, *(chance.randrange(97) for _ in range(prompt - 1)))
            streams.append(harness.submit(Request(str(number), tokens, Sampling(seed=number), output)))
        assert harness.snapshot().core.num_requests_waiting == 40
        harness.start_worker()
        harness.wait_ended(streams)
        counters = harness.snapshot().core.counters
        real = [stream.end.stats for stream in streams if stream.end is not None]
    ends: dict[str, Any] = {}
    capacity = WorkerCapacity(100, 4, 64, 512, 4096)
    run = VirtualRun(limits, replace(TIMING, worker=capacity), 1, 600.0)
    out = run.run([Arrival(0.0, p, o) for p, o in lengths], on_end=lambda e: ends.update({e.request_id: e.stats}))
    simulated = [ends[str(number)] for number in range(40)]
    fields = ("last_step", "completion_tokens", "preemptions", "recomputed_tokens", "cached_tokens")
    assert [[getattr(s, f) for f in fields] for s in simulated] == [[getattr(s, f) for f in fields] for s in real]
    assert out.steps == max(stats.last_step for stats in real)
    assert (out.preemptions, out.recomputed_tokens) == (counters.preemptions, counters.recomputed_tokens)
    assert max_batch_size == 4 or out.preemptions > 0


def test_workers_share_the_load() -> None:
    arrivals = [Arrival(0.0, 10, 20) for _ in range(32)]
    one, two = (simulate(arrivals, workers=count, max_batch_size=8) for count in (1, 2))
    assert one.finished == two.finished == 32
    assert two.seconds < 0.6 * one.seconds


def test_lost_requests_are_counted_by_reason() -> None:
    out = simulate([Arrival(0.0, 10, 5) for _ in range(6)], max_batch_size=1, max_queue_size=3)
    assert (out.finished, out.rejected) == (3, {"QUEUE_FULL": 3})
    limits = CoreLimits(policy=UNBOUNDED, pipeline_depth=1, max_batch_size=1)
    out = VirtualRun(limits, TIMING, 1, 0.1).run([Arrival(0.0, 10, 5) for _ in range(6)])
    assert out.failed == {"DEADLINE_EXCEEDED": 6 - out.finished}
    assert 0.1 <= out.seconds < 0.12, "the step in flight ends after the deadline"


def test_shared_prefixes_are_computed_once() -> None:
    timing = replace(TIMING, worker=WorkerCapacity(block_size=16))
    alone = [Arrival(float(n), 160 + 7, 2) for n in range(5)]
    shared = [arrival._replace(group=str(n % 2), prefix_tokens=160) for n, arrival in enumerate(alone)]
    assert simulate(alone, timing).prefix_hit_rate == 0.0
    assert simulate(shared, timing).prefix_hit_rate == pytest.approx(3 * 160 / (5 * 167))
    assert simulate(shared, timing, prefix_cache=False).prefix_hit_rate == 0.0


def test_stop_tokens_end_answers_before_max_tokens() -> None:
    known = [Arrival(0.01 * n, 10, 3 + n % 5) for n in range(20)]
    stopped = [arrival._replace(max_tokens=100) for arrival in known]
    first, second = simulate(known, pipeline_depth=2), simulate(stopped, pipeline_depth=2)
    assert first.output_tokens == second.output_tokens == sum(arrival.output_tokens for arrival in known)
    assert second.seconds > first.seconds, "a step in flight at a stop token is wasted"


def test_same_seed_gives_the_same_run() -> None:
    traffic = PoissonTraffic(100, parse_length("lognormal:20:1"), parse_length("exponential:20"), seed=1)
    timing = replace(TIMING, ratios=dict.fromkeys(range(20), (0.5, 1.0, 1.5)))
    outs = [VirtualRun(CoreLimits(), timing, 2, 600.0, seed).run(traffic.at(20.0)) for seed in (0, 0, 1)]
    figures = [{k: v for k, v in out.to_json().items() if k != "wall_seconds"} for out in outs]
    assert figures[0] == figures[1]
    assert figures[0] != figures[2]


def test_no_requests_and_endless_rate() -> None:
    assert simulate([]).finished == 0
    traffic = PoissonTraffic(10, parse_length("5"), parse_length("5"))
    assert {arrival.at for arrival in traffic.at(math.inf)} == {0.0}
