"""Compares the planner's prediction with a measured run of a server.

    python -m bench.prediction --model demo/model --rates 10 20 30 --out bench/results/DATE-prediction.jsonl

For each rate a new server gets Poisson arrivals over gRPC, and then another one gets other arrivals at the same rate.
The step times are fitted to the flight recording of the first server; the arrivals of the second are written to a file
and simulated. `own` is the same prediction with the step times of the second server itself: what it misses is the
model's error, the rest is the machine's drift between two runs.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.lineclear_serve import REQUEST_SECONDS, serving
from bench.measure import commit, machine
from lineclear.client import AdminClient, AsyncClient, Client
from lineclear.planner import fit
from lineclear.planner.arrivals import Arrival, PoissonTraffic, parse_length, read
from lineclear.planner.step_timing import StepTiming
from lineclear.planner.virtual_run import VirtualRun
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.settings import load


async def measured(model: str, arrivals: Sequence[Arrival], flags: Sequence[str], worker: Sequence[str]) -> Any:
    """Return the answers to `arrivals` from a new server as (first, gaps, end) seconds, and its step times."""
    with tempfile.TemporaryDirectory(prefix="lineclear-bench-") as folder:
        admin = f"unix:{folder}/admin.sock"
        own = [
            "--admin-listen",
            admin,
            "--recording-directory",
            f"{folder}/recordings",
            "--min-recorded-calls",
            "1000000",
        ]
        async with serving(model, [*own, *flags], worker) as service:
            chance, vocabulary = random.Random(0), (await service.client.model()).vocab_size
            prompts = [[chance.randrange(10, vocabulary) for _ in range(a.prompt_tokens)] for a in arrivals]
            await asyncio.gather(
                *(_answer(service.client, 0.0, prompts[0][:8], 16, time.perf_counter()) for _ in "1234")
            )
            begin = time.perf_counter() + 0.1
            answers = await asyncio.gather(
                *(
                    _answer(service.client, a.at, prompt, a.output_tokens, begin)
                    for a, prompt in zip(arrivals, prompts, strict=True)
                )
            )
            with Client(admin) as client:
                path = await asyncio.to_thread(AdminClient(client).dump_recording)
            return answers, fit.load(Path(path))


async def _answer(client: AsyncClient, at: float, prompt: Sequence[int], max_tokens: int, begin: float) -> Any:
    await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
    sent = time.perf_counter()
    async with client.stream(
        prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        omit_text=True,
        token_timings=True,
        timeout_seconds=REQUEST_SECONDS,
    ) as stream:
        first, times = 0.0, list[float]()
        async for delta in stream:
            if delta.token_ids and not times:
                first = time.perf_counter() - sent
            times += delta.token_times_seconds
    now = time.perf_counter()
    gaps = [b - a for a, b in pairwise(times)]
    return first, gaps, now - sent, now - begin, times


def figures(answers: Sequence[Any], arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Return the measured figures. Times are the server's, from the arrival of a request, but for `client_` ones."""
    firsts, ends = sorted(a[4][0] for a in answers), sorted(a[4][-1] for a in answers)
    gaps = sorted(gap for a in answers for gap in a[1])
    span = max(a[3] for a in answers) - arrivals[0].at
    return {
        "tokens_per_second": sum(len(a[4]) for a in answers) / span,
        "ttft_mean_ms": 1e3 * fmean(firsts),
        "ttft_p50_ms": 1e3 * _quantile(firsts, 0.5),
        "ttft_p99_ms": 1e3 * _quantile(firsts, 0.99),
        "itl_mean_ms": 1e3 * fmean(gaps),
        "itl_p50_ms": 1e3 * _quantile(gaps, 0.5),
        "itl_p99_ms": 1e3 * _quantile(gaps, 0.99),
        "e2e_mean_ms": 1e3 * fmean(ends),
        "e2e_p99_ms": 1e3 * _quantile(ends, 0.99),
        "client_ttft_mean_ms": 1e3 * fmean(a[0] for a in answers),
        "client_e2e_mean_ms": 1e3 * fmean(a[2] for a in answers),
    }


def _quantile(ranked: Sequence[float], share: float) -> float:
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def predicted(timing: StepTiming, arrivals: Sequence[Arrival], flags: Sequence[str]) -> dict[str, float]:
    """Return the planner's figures for the same arrivals."""
    settings, _ = load(list(flags))
    limits = settings.part(CoreLimits)
    out = VirtualRun(limits, timing, 1, settings.default_deadline_seconds).run(arrivals)
    first, gap, end = out.time_to_first_token, out.inter_token_latency, out.request_seconds
    return {
        "tokens_per_second": out.tokens_per_second,
        "ttft_mean_ms": 1e3 * first.mean,
        "ttft_p50_ms": 1e3 * first.quantile(0.5),
        "ttft_p99_ms": 1e3 * first.quantile(0.99),
        "itl_mean_ms": 1e3 * gap.mean,
        "itl_p50_ms": 1e3 * gap.quantile(0.5),
        "itl_p99_ms": 1e3 * gap.quantile(0.99),
        "e2e_mean_ms": 1e3 * end.mean,
        "e2e_p99_ms": 1e3 * end.quantile(0.99),
    }


def traffic(rate: float, seconds: float, prompt: str, output: str, seed: int) -> list[Arrival]:
    """Return Poisson arrivals over `seconds`, through a file as `--arrivals` reads it."""
    made = PoissonTraffic(max(20, round(rate * seconds)), parse_length(prompt), parse_length(output), seed=seed)
    with tempfile.NamedTemporaryFile("w+", suffix=".csv", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival", "prompt_tokens", "output_tokens"))
        writer.writerows(arrival[:3] for arrival in made.at(rate))
        file.flush()
        return read(Path(file.name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and predict each rate; print a table and append a line of JSON for each to `--out`."""
    mine = list(sys.argv[1:] if arguments is None else arguments)
    mine, flags = (mine[: mine.index("--")], mine[mine.index("--") + 1 :]) if "--" in mine else (mine, [])
    flags, worker = (flags[: flags.index("--")], flags[flags.index("--") + 1 :]) if "--" in flags else (flags, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 20.0, 30.0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prompt-tokens", default="uniform:16:256")
    parser.add_argument("--output-tokens", default="uniform:16:128")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(mine)
    for rate in o.rates:
        first = traffic(rate, o.seconds, o.prompt_tokens, o.output_tokens, 1)
        second = traffic(rate, o.seconds, o.prompt_tokens, o.output_tokens, 2)
        _, (timing, fitted) = asyncio.run(measured(o.model, first, flags, worker))
        answers, (own, own_fit) = asyncio.run(measured(o.model, second, flags, worker))
        found = {
            "measured": figures(answers, second),
            "predicted": predicted(timing, second, flags),
            "own": predicted(own, second, flags),
        }
        print(f"\n{rate:g} requests/s, {len(second)} requests\n  fitted: {fitted}\n  own:    {own_fit}")
        for name, value in found["measured"].items():
            if name.startswith("client_"):
                print(f"  {name:18} {value:9.2f}")
                continue
            errors = [found[kind][name] / value - 1 for kind in ("predicted", "own")]
            other, same = (found[kind][name] for kind in ("predicted", "own"))
            shown = f"predicted {other:9.2f} ({errors[0]:+.1%})  own {same:9.2f} ({errors[1]:+.1%})"
            print(f"  {name:18} {value:9.2f}  {shown}")
        if o.out:
            entry = {"rate": rate, "requests": len(second), "flags": flags, "worker": worker, **found}
            entry |= {"timing": timing.to_json(), "own_timing": own.to_json(), "commit": commit(), "machine": machine()}
            with o.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
