"""The micro-benchmarks run, at sizes that take no time, and reach their goals where they count work."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable

import pytest

from bench import micro_core, micro_counts, micro_wire
from bench.figures import Figure, scaled, seconds_per_call, table
from bench.limits import Costs, makespan
from bench.micro_attention import BLOCK_SIZE, CHUNK, _pool, prompt
from bench.micro_core import decoding, queueing
from bench.micro_wire import decodes
from bench.overload import cadence_figures, parser, refusal_figures
from bench.workloads import PREFIX_TOKENS, make
from lineclear.wire.codec import decode, encode


def values(figures: Iterable[Figure]) -> dict[str, float]:
    return {f"{figure.name}, {figure.case}": figure.value for figure in figures if figure.value is not None}


@pytest.mark.parametrize(
    ("value", "more_is_better", "verdict"),
    [
        (1.0, False, "met (<= 2)"),
        (3.0, False, "MISSED (<= 2)"),
        (3.0, True, "met (>= 2)"),
        (None, False, "NOT MEASURED (<= 2)"),
        (None, True, "NOT MEASURED (>= 2)"),
    ],
)
def test_verdicts(value: float | None, more_is_better: bool, verdict: str) -> None:
    figure = Figure("a", "b", value, "us", 2.0, more_is_better)
    assert figure.verdict == verdict
    assert f"| {'no figure' if value is None else figure.shown} | {verdict} |" in table([figure])


def test_missing_value_is_not_zero() -> None:
    assert (scaled(None, 1e3), scaled(0.5, 1e3)) == (None, 500.0)


def test_clock_counts_calls() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    assert 0 <= seconds_per_call(call, calls=5, rounds=3) < 0.01
    assert calls == 5 * 4  # the first round warms up


def test_core_at_a_few_sequences() -> None:
    found = values(decoding(3))
    assert found.keys() == {"core: plan, 3 decodes", "core: apply, 3 decodes", "core: plan and apply, 3 decodes"}
    assert len(values(queueing(1300))) == 6


def test_wire_benchmark_decodes_one_token_per_row() -> None:
    plan, result = decodes(32)
    assert decode(encode(plan)) == plan
    assert len(plan.rows) == len(result.tokens) == 32
    assert sum(len(row.new_blocks) for row in plan.rows) == 2


def test_benchmark_options() -> None:
    assert micro_core.parser().parse_args([]).decodes == [1, 32, 256, 1024, 4096]
    found = values(micro_wire.figures(micro_wire.parser().parse_args(["--rows", "1"])))
    assert found["wire: plan and result, 1 decodes"] == sum(
        found[f"wire: size of {name}, 1 decodes"] for name in ("plan", "result")
    )


def flat_costs() -> Costs:
    """A step costs 1 s a token it computes, nothing else."""
    rows = {1: 1.0, 1024: 1024.0}
    return Costs(rows, dict.fromkeys(rows, 0.0), 1.0, 0)


def test_ideal_makespan_computes_every_token_once() -> None:
    workload = make("w1", 8)
    # The last output token is sampled and never computed.
    tokens = workload.prompt_tokens + workload.wanted_tokens - len(workload.jobs)
    for slots, budget in ((1, 64), (4, 64), (64, 512)):
        assert makespan(workload, flat_costs(), slots, budget) == pytest.approx(tokens)


def test_ideal_makespan_computes_a_shared_prefix_once() -> None:
    workload, plain = make("w2", 8), make("w1", 8)
    alone = makespan(plain, flat_costs(), 64, 256)
    assert makespan(workload, flat_costs(), 64, 256, PREFIX_TOKENS) == pytest.approx(alone + PREFIX_TOKENS)


def test_costs_are_interpolated() -> None:
    costs = Costs({1: 1.0, 8: 8.0, 64: 8.0}, {1: 0.5, 64: 0.5}, 10.0, 2)
    assert costs.step(4, 0, 0) == pytest.approx(4.0)
    assert costs.step(36, 1, 5) == pytest.approx(8.0 + 0.5 + 1.0)
    assert costs.step(128, 0, 0) == pytest.approx(16.0)


def test_every_goal_is_met() -> None:
    missed = [figure for figure in micro_counts.figures(argparse.Namespace()) if figure.verdict.startswith("MISSED")]
    assert not missed


# --- shapes that attention is timed on ---


@pytest.mark.parametrize("context", [0, 64, 256, 2048])
def test_prompt_fits_the_pool_at_every_context(context: int) -> None:
    (chunk,) = prompt(random.Random(0), context).chunks
    assert (chunk.start, chunk.num_queries) == (context, CHUNK)
    assert len(set(chunk.blocks.tolist())) == -(-(context + CHUNK) // BLOCK_SIZE) <= _pool(2, context)


# --- the overload driver, from given times without a service ---


def the_one(figures: list[Figure], name: str) -> Figure:
    return next(figure for figure in figures if name in figure.name)


@pytest.mark.parametrize(
    ("seconds", "p50", "verdict"),
    [
        ([], None, "NOT MEASURED (<= 0.02)"),
        ([0.002] * 50 + [0.004], 0.002, "met (<= 0.02)"),
        ([0.002] * 50 + [5.0], 0.002, "MISSED (<= 0.02)"),
    ],
)
def test_prober_reports_refusal_times(seconds: list[float], p50: float | None, verdict: str) -> None:
    found = refusal_figures("10x", seconds)
    assert the_one(found, "refusals").value == len(seconds)
    assert (the_one(found, "p50").value, the_one(found, "p99").verdict) == (p50, verdict)


def test_cadence_counts_its_gaps() -> None:
    found = cadence_figures("beside", [0.05] * 400, [0.05] * 100 + [0.2] * 100)
    assert [figure.value for figure in found if figure.unit == "gaps"] == [400, 200]
    assert the_one(found, "against").value == pytest.approx(4.0)
    assert the_one(found, "against").verdict == "MISSED (<= 1.1)"


@pytest.mark.parametrize(("alone", "beside"), [([], [0.05]), ([0.05], []), ([], [])])
def test_empty_cadence_has_no_ratio(alone: list[float], beside: list[float]) -> None:
    assert the_one(cadence_figures("beside", alone, beside), "against").verdict == "NOT MEASURED (<= 1.1)"


def test_streams_are_read_for_their_own_time() -> None:
    assert parser().parse_args(["--model", "m", "--seconds", "5"]).reading_seconds == 30
    assert parser().parse_args(["--model", "m", "--reading-seconds", "2"]).reading_seconds == 2
