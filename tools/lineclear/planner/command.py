"""`lineclear simulate` and `lineclear simulate fit`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lineclear.exit_codes import ExitCode
from lineclear.planner import fit, report
from lineclear.planner.arrivals import (
    Arrival,
    BadArrivals,
    PoissonTraffic,
    parse_length,
    rate_of,
    read,
    scaled,
)
from lineclear.planner.settings import SimulationSettings, worker_counts
from lineclear.planner.step_timing import StepTiming
from lineclear.planner.virtual_run import Outcome, curve
from lineclear.process import settings_base
from lineclear.process.command_line import Hints
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.core.limits import CoreLimits


def main(words: Sequence[str]) -> int:
    """Run the command line `words`. Returns the exit code."""
    try:
        return _fit(words[1:]) if words[:1] == ["fit"] else _simulate(words)
    except (ConfigurationError, BadArrivals, fit.NoFit) as error:
        print(f"lineclear simulate: {error}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    except OSError as error:
        print(f"lineclear simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _fit(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("lineclear simulate fit", description="Fit step times to a flight recording.")
    parser.add_argument("file", type=Path, help="flight recording (lineclear admin dump) or file of step records")
    parser.add_argument("--out", type=Path, help="JSON file for --model-of-steps")
    options = parser.parse_args(list(words))
    timing, found = fit.load(options.file)
    print(found or "this file is a fit already")
    if found is not None and found.warning:
        print(f"warning: {found.warning}", file=sys.stderr)
    print(f"worker: {timing.worker}")
    if options.out:
        timing.save(options.out)
    return ExitCode.OK


def _simulate(words: Sequence[str]) -> int:
    settings = settings_base.load(
        SimulationSettings, words, Hints(unknown_word="the arrivals are named by --arrivals {}")
    )
    timing = _timing(settings)
    outcomes: list[Outcome] = []
    limits = settings.part(CoreLimits)
    counts = worker_counts(settings.workers)
    runs = curve(limits, timing, counts, _loads(settings), settings.default_deadline_seconds, settings.seed)
    for outcome in runs:
        if not outcomes:
            print(report.header())
        print(report.row(outcome), flush=True)
        outcomes.append(outcome)
    for name, total in _losses(outcomes).items():
        print(f"lost with {name}: {total}")
    if settings.target_ttft_p99_ms:
        for line in report.needed_workers(outcomes, settings.target_ttft_p99_ms):
            print(line)
    if settings.out:
        shown = settings.model_dump(include=settings.model_fields_set)
        text = json.dumps(report.to_json(outcomes, **shown, timing=timing.to_json()), indent=1)
        Path(settings.out).write_text(text + "\n", encoding="utf-8")
    if settings.svg_file:
        Path(settings.svg_file).write_text(report.plot(outcomes), encoding="utf-8")
    return ExitCode.OK


def _timing(settings: SimulationSettings) -> StepTiming:
    if not settings.model_of_steps:
        raise ConfigurationError(
            "--model-of-steps is missing: give a flight recording of your server (lineclear admin dump) or a JSON file"
            " with base_seconds, seconds_per_token and seconds_per_kv_token"
        )
    timing, found = fit.load(Path(settings.model_of_steps))
    if found is not None:
        if found.is_unusable:
            raise fit.NoFit(
                f"{settings.model_of_steps}: {found.warning}. To plan by it all the same, write it to a file:"
                " lineclear simulate fit FILE --out FIT, and give that"
            )
        print(f"model of steps, {found}")
        if found.warning:
            print(f"warning: {found.warning}", file=sys.stderr)
    names = ("num_blocks", "block_size", "max_step_tokens", "max_model_len")
    given = {name: getattr(settings, name) for name in names if getattr(settings, name)}
    timing = replace(timing, worker=replace(timing.worker, **given))
    return timing if settings.step_spread else timing.without_spread()


def _loads(settings: SimulationSettings) -> Iterator[tuple[float, Iterable[Arrival]]]:
    if settings.arrivals != "poisson":
        arrivals = read(Path(settings.arrivals))
        if not settings.rates:
            yield rate_of(arrivals), arrivals
        for rate in settings.rates:
            yield rate, scaled(arrivals, rate)
        return
    if not settings.rates:
        raise ConfigurationError("--rate is missing: poisson needs requests a second, such as --rate 5,10,20")
    traffic = PoissonTraffic(
        settings.num_requests,
        parse_length(settings.prompt_tokens),
        parse_length(settings.output_tokens),
        settings.shared_prefix_groups,
        settings.shared_prefix_tokens,
        settings.seed,
    )
    for rate in settings.rates:
        yield rate if math.isfinite(rate) else math.inf, traffic.at(rate)


def _losses(outcomes: Iterable[Outcome]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for outcome in outcomes:
        for counts in (outcome.rejected, outcome.failed):
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
    return totals
