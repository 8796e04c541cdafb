"""The figures of a running server agree: requests of all kinds, deadlines and a lost worker, then every equation."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from support.figures import Page, check_page, check_stats
from support.processes import BOUND_SECONDS, Running, endless, starting, until
from support.service import is_idle
from support.small_tokenizers import byte_level, save

from lineclear.cli.output import model_view, stats_view
from lineclear.client import Client
from lineclear.errors import Cancelled, PromptTooLong

PROMPT = [7, 8, 9, 10, 11, 12, 13]
SLOW = {"min_step_seconds": 0.005, "max_step_seconds": 0.005}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    model = save(tmp_path_factory.mktemp("model"), byte_level())
    with starting(model, "--metrics-listen", "127.0.0.1:0") as start_scheduler:
        yield start_scheduler


def final_page(server: Running, client: Client) -> Page:
    """Return the page of the idle server, after every equation has been checked."""
    until(lambda: is_idle(client.stats()))
    page = check_page(Page(server.metrics_page()), idle=True)
    check_stats(client.stats(), page)
    return page


def outcomes(server: Running) -> Counter[str]:
    """Return the outcomes in the log."""
    return Counter(line["outcome"] for line in list(server.lines) if line.get("event") == "request_ended")


def test_deadlines_count_as_expired(start: Callable[..., Running]) -> None:
    """The client resets the call at its deadline, and the server ends it at the same time: either may be first.

    On a busy machine a deadline may pass before the request is admitted. Then it counts as rejected, and it has no line
    in the log if it was not even read.
    """
    server = start(**SLOW)
    with Client(server.address) as client:
        for call in [server.stub.Generate(endless(), timeout=0.5) for _ in range(6)]:
            with pytest.raises(grpc.RpcError):
                list(call)
        for _ in range(3):
            call = server.stub.Generate(endless(), timeout=BOUND_SECONDS)
            next(call)
            call.cancel()
        until(lambda: (shown := Page(server.metrics_page())) and (shown.ended + shown.rejected).total() == 9)
        page = final_page(server, client)
    assert page.ended + page.rejected == {"deadline_exceeded": 6, "cancelled": 3}
    assert page["requests_expired_total"] + page.rejected["deadline_exceeded"] == 6
    assert page["requests_cancelled_total"] == 3
    assert outcomes(server) <= page.ended + page.rejected


def test_requests_of_all_kinds_are_counted_once(start: Callable[..., Running]) -> None:
    server = start("--max-batch-size", "6", **SLOW)
    fixed: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 1}
    with Client(server.address) as client:
        client.generate(PROMPT, **fixed)
        client.generate(PROMPT, n=3, **fixed)
        client.generate(PROMPT, n=2, best_of=4, **fixed)
        client.generate(PROMPT, num_beams=3, max_tokens=6, ignore_eos=True)
        client.score(PROMPT, [[5, 6], [7]])
        client.embed([PROMPT, [1, 2]])
        client.submit(PROMPT, **fixed).result()
        with pytest.raises(PromptTooLong):
            client.generate([5] * 600, max_tokens=4)
        submitted = client.submit(PROMPT, max_tokens=500, ignore_eos=True)
        until(lambda: submitted.poll().state == "running")
        submitted.cancel()
        with pytest.raises(Cancelled):
            submitted.result()
        page = final_page(server, client)
    assert page.ended == {"length": 5, "no_output": 4, "cancelled": 1}
    assert page.rejected == {"prompt_too_long": 1}
    assert page["time_to_first_token_seconds_count"] == 5


def test_figures_include_all_that_the_client_has_seen(start: Callable[..., Running]) -> None:
    """Also while another request keeps the engine busy."""
    server = start("--max-batch-size", "4", **SLOW)
    with Client(server.address) as client, client.stream([5, 6], max_tokens=400, ignore_eos=True) as other:
        next(iter(other))
        for number in range(1, 9):
            client.generate(PROMPT, max_tokens=2, ignore_eos=True)
            page = check_page(Page(server.metrics_page()))
            shown = client.stats().counters.prompt_tokens, page["prompt_tokens_total"]
            assert shown == (2 + number * len(PROMPT),) * 2


def test_figures_of_single_requests_are_those_computed_by_hand(start: Callable[..., Running]) -> None:
    """A prompt of 7 tokens and 12 output tokens: a step for each output token, and the last one is not computed again.

    After the steps 7, 8, ... 18 positions are held. The second request finds 6: the last one is computed to sample.
    """
    server = start(**SLOW)
    with Client(server.address) as client:
        found = []
        for _ in range(2):
            client.generate(PROMPT, max_tokens=12, ignore_eos=True, seed=1)
            found.append(final_page(server, client).counters)
        stats = client.stats()
    names = ("steps", "rows", "step_tokens", "step_positions", "prompt_tokens", "generation_tokens")
    names += ("prefix_cache_queries", "prefix_cache_hits", "wasted_samples", "recomputed_tokens", "preemptions")
    first, second = ([getattr(counters, name) for name in names] for counters in found)
    assert first == [12, 12, 7 + 11, sum(range(7, 19)), 7, 12, 7, 0, 0, 0, 0]
    assert second == [24, 24, 18 + 12, 2 * sum(range(7, 19)), 14, 24, 14, 6, 0, 0, 0]
    assert (stats.mean_batch_size, stats.prefix_cache_hit_ratio) == (1.0, 6 / 14)
    assert [worker.steps for worker in stats.workers] == [24]
    assert stats.e2e_request_latency_seconds.count == 2
    assert stats.request_mean_inter_token_latency_seconds.mean >= SLOW["min_step_seconds"] * 0.9


HALF = """
import os, sys, time
from pathlib import Path
try:
    (Path({folder!r}) / "first").mkdir()
except FileExistsError:
    os.execv(sys.executable, [sys.executable, "-m", "support.toy_worker_command", *sys.argv[1:]])
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.05)
"""
"""A worker that never joins where it is the first one, and a toy worker else."""


def test_a_worker_that_has_not_joined_is_shown(start: Callable[..., Running], tmp_path: Path) -> None:
    """Under the number that its log lines have, and so is the one that has joined."""
    code = HALF.format(folder=str(tmp_path))
    server = start("--num-workers", "2", worker_command=(sys.executable, "-c", code))
    with Client(server.address) as client:
        stats = client.stats()
        gauges = stats.gauges
        counts = gauges.num_workers_wanted, gauges.num_workers_joined, gauges.num_workers_starting
        assert (*counts, gauges.num_workers_given_up) == (2, 1, 1, 0)
        number_of = {line["pid"]: line["worker"] for line in server.lines if line.get("event") == "worker_started"}
        assert {worker.pid: worker.index for worker in stats.workers} == number_of
        assert sorted(worker.state for worker in stats.workers) == ["joined", "starting"]
        page = check_page(Page(server.metrics_page()))
        joined = {int(index): value for index, value in page.by_label("worker_joined").items()}
        assert joined == {worker.index: float(worker.state == "joined") for worker in stats.workers}
        assert (page["num_workers_wanted"], page["num_workers_joined"], page["num_workers_starting"]) == (2, 1, 1)
        with Console(width=80, file=io.StringIO()) as console, console.capture() as shown:
            console.print(stats_view(stats))
        assert all(re.search(rf"pid .*\b{worker.pid}\b", shown.get()) for worker in stats.workers)
        with Console(width=120, file=io.StringIO()) as console, console.capture() as shown:
            console.print(stats_view(stats))
            console.print(model_view(client.model()))
        assert "1 of 2 joined, 1 starting" in (text := shown.get())
        assert re.search(r"toy int, toy, modules: it is a\s+toy\)", text)
        assert re.search(r"forward pass +modules: it is a toy\n", text)
