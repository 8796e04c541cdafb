"""The status page over real HTTP: what it serves, to whom, and what hostile viewers cost. Once in a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from observe.chromium import Page, chromium
from observe.status_viewer import TOKEN, address, events, get
from support.processes import Process, Running, endless, starting, until
from support.time_limits import PATIENCE_SECONDS
from support.worker_kills import signal_worker

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler import settings
from lineclear.scheduler.observe.scheduler_state import TakenState
from lineclear.scheduler.observe.step_feed import REPLACE_SECONDS, StepFeed
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.scheduler.status_page import status_server
from lineclear.scheduler.status_page.status_server import StatusServer
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import steps_pb2

TLS = ["--tls-cert-file", "c", "--tls-key-file", "k"]
SLOW = {"min_step_seconds": 0.01, "max_step_seconds": 0.01}
IMAGES = os.environ.get("STATUS_IMAGES", "")
"""A folder for the screenshots of the documentation."""


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Running]]:
    with starting(model, "--status-listen", "127.0.0.1:0") as start_scheduler:
        yield start_scheduler


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with starting(model, "--status-listen", "127.0.0.1:0") as start_scheduler:
        yield start_scheduler()


def test_the_page_needs_nothing_from_elsewhere(server: Running) -> None:
    page = get(server, "/status").read().decode()
    for path in ("/status/status.css", "/status/status.js", "/status/pictures.js"):
        assert path in page
        response = get(server, path)
        text = response.read().decode()
        assert response.status == 200
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "://" not in page
    response = get(server, "/status")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert get(server, "/").read().decode() == page
    assert get(server, "/status", "HEAD").status == 200
    assert get(server, "/status/steps", "HEAD").status == 404
    assert get(server, "/status/steps?history=all").status == 200
    assert get(server, "/status/../settings.py").status == 404
    assert get(server, "/status", "POST").status == 405


def test_the_stream_has_steps_and_state_without_content(server: Running) -> None:
    request = pb.GenerateRequest(
        text="confidential words", request_id="invoice-4711", sampling={"max_tokens": 20, "ignore_eos": True}
    )
    list(server.stub.Generate(request))
    assert get(server, "/favicon.ico").status == 204
    stream = events(get(server, "/status/steps?history=100"))
    data = next(stream)
    assert sum(sum(step["rows"]["samples"]) for step in data["steps"]) == 20
    assert {number for step in data["steps"] for number in step["rows"]["request"]} == {1}
    (worker,) = data["state"]["workers"]
    assert worker["blocks_used"] == 0
    text = json.dumps(data)
    assert "invoice" not in text
    assert "confidential" not in text
    list(server.stub.Generate(request))
    later = [step for data in islice(stream, 1) for step in data.get("steps", ())]
    assert {number for step in later for number in step["rows"]["request"]} == {2}


def test_the_stream_needs_the_token_and_the_log_has_none(start: Callable[..., Running], tokens: Path) -> None:
    server = start("--admin-token-file", str(tokens))
    list(server.stub.Generate(endless()))
    assert get(server, "/status").status == 200
    for headers in ({}, {"Authorization": "Bearer wrong-0123456789abcdef"}, {"Authorization": f"Basic {TOKEN}"}):
        assert get(server, "/status/steps", **headers).status == 401
    assert get(server, f"/status/stats?token={TOKEN}").status == 401
    stream = events(get(server, "/status/steps?history=5", Authorization=f"Bearer {TOKEN}"))
    assert len(next(stream)["steps"]) == 5
    server.wait_for("admin_call", rpc="status_page", name="operator")
    server.wait_for("auth_failures", count=3, problem="status_page")
    assert [line["num_rejected"] for line in server.logged("auth_failures")] == [1, 2, 4]
    tokens.chmod(0o600)
    tokens.write_text("operator another-0123456789abcdef\n")
    for _ in stream:
        pass  # the stream ends, because the token is revoked
    assert TOKEN not in json.dumps(server.lines) + "".join(server.other)


def test_the_figures_are_those_of_get_stats(server: Running) -> None:
    list(server.stub.Generate(endless()))
    stats, found = server.stub.GetStats(pb.GetStatsRequest()), json.load(get(server, "/status/stats"))
    assert found["counters"]["requests_finished"] == stats.counters.requests_finished > 0
    assert found["time_to_first_token_seconds"]["p99"] == stats.time_to_first_token_seconds.p99 > 0
    assert [(worker["state"], worker["joins"]) for worker in found["workers"]] == [("joined", 1)]
    assert get(server, "/status/stats", Sec_Fetch_Site="cross-site").status == 403
    assert get(server, "/status/stats", Host="attacker.example").status == 403


def test_other_sites_cannot_read_the_steps(server: Running) -> None:
    for name in ("attacker.example", "attacker.example:80", "10.0.0.1:8000", "localhost.attacker.example", ""):
        assert get(server, "/status/steps", Host=name).status == 403, name
    for name in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert get(server, "/status", Host=name).status == 200, name
    assert get(server, "/status/steps", Sec_Fetch_Site="cross-site").status == 403
    assert "Access-Control-Allow-Origin" not in get(server, "/status").headers


def test_a_hundred_unread_connections_cost_the_engine_nothing(start: Callable[..., Running]) -> None:
    """The engine makes the same steps, and takes states for the few streams that it allows: no more than for one."""
    server = start("--max-step-watchers", "4")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            viewer = stack.enter_context(socket.create_connection(address(server), timeout=PATIENCE_SECONDS))
            viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            viewer.sendall(b"GET /status/steps HTTP/1.1\r\nHost: localhost\r\n\r\n")
        tokens = [token for response in server.stub.Generate(endless()) for token in response.token_ids]
        steps = server.stub.GetStats(pb.GetStatsRequest()).counters.steps
        assert len(tokens) == 500
        assert steps <= 503
        assert len([line for line in server.lines if line.get("event") == "admin_call"]) <= 8
        assert get(server, "/status").status == 200, "the page itself is served"


def test_streams_beyond_the_limit_are_refused_and_places_are_freed(start: Callable[..., Running]) -> None:
    server = start("--max-step-watchers", "1", **SLOW)
    call = server.stub.Generate(endless())
    next(call)
    first = get(server, "/status/steps")
    next(events(first))
    refused = get(server, "/status/steps")
    assert (refused.status, b"--max-step-watchers" in refused.read()) == (503, True)
    first.close()
    until(lambda: get(server, "/status/steps").status == 200)


@contextlib.contextmanager
def serving(feed: StepFeed) -> Iterator[Callable[[], http.client.HTTPResponse]]:
    """Serve the page in this process; yield a function that opens a stream."""
    server = StatusServer("127.0.0.1:0", feed, None, 16, pb.GetStatsResponse)
    host, port = server.server_address[0], server.server_port

    def ask() -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(str(host), port, timeout=PATIENCE_SECONDS)
        connection.request("GET", "/status/steps")
        return connection.getresponse()

    try:
        yield ask
    finally:
        feed.close()
        server.close()


def test_unread_streams_make_room_after_a_minute() -> None:
    now = [100.0]
    state = TakenState(steps_pb2.SchedulerState())
    with serving(StepFeed(StepHistory(8), lambda call: call(), lambda: state, 16, lambda: now[0])) as ask:
        unread = [ask() for _ in range(16)]
        assert [response.status for response in unread] == [200] * 16
        assert ask().status == 503
        now[0] += REPLACE_SECONDS
        live = [ask() for _ in range(16)]
        assert [response.status for response in live] == [200] * 16
        for response in unread:
            list(events(response))  # up to its end
        assert ask().status == 503


def test_a_viewer_that_has_gone_is_found_while_the_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write finds it, so comments are sent where there are no steps and no state."""
    monkeypatch.setattr(status_server, "_STATE_SECONDS", 0.01)
    monkeypatch.setattr(status_server, "_KEEP_ALIVE_SECONDS", 0.0)
    feed = StepFeed(StepHistory(8), lambda call: None, Mock(), 1)
    with serving(feed) as ask:
        response = ask()
        assert response.readline() == b":\n"
        response.close()
        until(lambda: feed.num_watchers == 0)


def test_streams_end_when_the_server_stops(start: Callable[..., Running]) -> None:
    server = start("--max-step-watchers", "16")
    streams = [events(get(server, "/status/steps")) for _ in range(16)]
    for stream in streams:
        next(stream)
    server.popen.send_signal(signal.SIGTERM)
    assert [list(stream)[-1] for stream in streams] == [{}] * 16
    assert server.exit_code() == 0


def test_newer_connections_do_not_close_a_stream(start: Callable[..., Running]) -> None:
    """The oldest connection makes room for a new one, unless it is a stream."""
    server = start("--max-step-watchers", "1")
    stream = events(get(server, "/status/steps"))
    next(stream)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(address(server), timeout=PATIENCE_SECONDS))
        assert get(server, "/status").status == 200
        list(server.stub.Generate(endless()))
        assert any(step["ended"] for data in stream for step in data.get("steps", ()))


@pytest.mark.parametrize(
    ("flags", "accepted"),
    [
        (["--status-listen", "127.0.0.1:0"], True),
        (["--status-listen", "0.0.0.0:0"], False),
        (["--status-listen", "0.0.0.0:0", "--admin-token-file", "t"], False),
        (["--status-listen", "0.0.0.0:0", "--insecure-allow-remote"], False),
        (["--status-listen", "0.0.0.0:0", "--admin-token-file", "t", "--insecure-allow-remote"], True),
        (["--status-listen", "0.0.0.0:0", "--admin-token-file", "t", *TLS], True),
        (["--status-listen", "0.0.0.0:0", *TLS], False),
        (["--listen", "unix:/tmp/s", "--status-listen", "127.0.0.1:0", *TLS], True),
        (["--status-listen", "unix:/tmp/s"], False),
    ],
)
def test_a_remote_page_needs_a_token_and_tls_or_consent(flags: list[str], accepted: bool) -> None:
    raises = contextlib.nullcontext() if accepted else pytest.raises(ConfigurationError, match="status-listen")
    with raises:
        settings.load(["--model", "m", *flags])


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as opened:
        yield opened


def load(server: Running) -> list[Any]:
    """Start requests of several lengths, some with a common prefix."""
    calls = []
    for seed in range(24):
        request = endless(seed)
        prefix = range(5, 69) if seed % 3 else range(5 + seed, 30 + seed)
        request.token_ids.ids[:] = [*prefix, seed + 70]
        request.sampling.max_tokens = 20 + 25 * (seed % 5) if seed < 8 else 400
        calls.append(server.stub.Generate(request))
        time.sleep(0.05)
    return calls


def watch(page: Page, server: Running) -> None:
    """Open the page and wait for the stream."""
    host, port = address(server)
    page.go(f"http://{host}:{port}/status")
    page.wait("document.querySelector('#connection') && document.querySelector('#connection').innerText === 'live'")


def test_a_drawing_reads_the_colours_once(start: Callable[..., Running], page: Page) -> None:
    server = start("--max-batch-size", "8", **SLOW)
    watch(page, server)
    page.evaluate("const read = getComputedStyle; globalThis.reads = 0")
    page.evaluate("globalThis.getComputedStyle = (...of) => { reads += 1; return read(...of) }")
    calls = load(server)
    page.wait("document.querySelectorAll('#running progress').length === 8")
    assert page.evaluate("reads = 0, draw(), reads") == 1
    for call in calls:
        call.cancel()


def test_a_paused_page_stays_as_it_is(start: Callable[..., Running], page: Page) -> None:
    """A click on a step, or a new size, draws the steps that were there at the pause."""
    server = start("--max-batch-size", "8", **SLOW)
    watch(page, server)
    calls = load(server)
    page.wait("document.querySelectorAll('#running progress').length === 8")
    page.evaluate("document.querySelector('#pause').click()")
    title, running = page.text("#timelines .worker"), page.text("#running")
    page.wait("live.steps.at(-1).number > view.steps.at(-1).number + 20")
    page.evaluate("document.querySelector('#timelines canvas').dispatchEvent(new MouseEvent('click'))")
    page.resize(1000, 900)
    page.wait("innerWidth === 1000")
    assert (page.text("#timelines .worker"), page.text("#running")) == (title, running)
    page.evaluate("document.querySelector('#pause').click()")
    page.wait(f"document.querySelector('#timelines .worker').innerText !== {title!r}")
    for call in calls:
        call.cancel()


def test_the_page_follows_a_server_that_starts_again(start: Callable[..., Running], page: Page) -> None:
    """Its steps and totals begin anew: nothing of the first server is left, and no rate is negative."""
    first = start("--max-batch-size", "8", **SLOW)
    watch(page, first)
    for call in load(first)[:8]:
        list(call)
    page.evaluate(
        """globalThis.rates = []; new MutationObserver(() => rates.push(document.querySelector('#tokens-per-second')
        .innerText)).observe(document.querySelector('#tokens-per-second'), {childList: true}); 0"""
    )
    first.popen.kill()
    page.wait("document.querySelector('#connection').innerText.includes('trying again')")
    second = start("--status-listen", ":".join(map(str, address(first))))
    page.wait("document.querySelector('#connection').innerText === 'live'")
    page.wait("view.state && view.state.generation_tokens === 0 && view.steps.length === 0")
    list(second.stub.Generate(endless()))
    page.wait("view.state.generation_tokens === 500")
    assert [rate for rate in page.evaluate("rates") if int(rate) < 0] == []
    page.problems.clear()  # the browser reports the connections that failed


def test_the_page_says_that_no_worker_has_joined(model: Path, tmp_path: Path, page: Page) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    flags = ["--status-listen", "127.0.0.1:0", "--socket-directory", f"{tmp_path}/run", "--log-format", "json"]
    with Process(["--model", str(model), "--listen", "127.0.0.1:0", *flags]) as server:
        page.go(server.wait_for("status_page_listening")["url"])
        page.wait("(document.querySelector('#connection') || {}).innerText === 'live; no worker has joined'")


def test_the_page_follows_a_worker_that_is_started_again(start: Callable[..., Running], page: Page) -> None:
    server = start(load_seconds=3.0)
    watch(page, server)
    cells = "[...document.querySelectorAll('#workers td')].map((cell) => cell.innerText).join(' ')"
    page.wait(f"{cells}.startsWith('0 joined toy 0 ')")
    signal_worker(lambda: server.stub.GetStats(pb.GetStatsRequest()).worker.pid)
    page.wait(f"{cells}.startsWith('0 starting')")
    page.wait(f"{cells}.startsWith('0 joined toy 1 ')")


def test_the_page_in_a_browser(start: Callable[..., Running], page: Page, tokens: Path) -> None:
    server = start(
        "--admin-token-file", str(tokens), "--max-batch-size", "8", min_step_seconds=0.02, max_step_seconds=0.03
    )
    page.resize(1280, 1280)
    host, port = address(server)
    page.go(f"http://{host}:{port}/status")
    page.wait("document.querySelector('#login') && !document.querySelector('#login').hidden")
    page.evaluate("document.querySelector('#token').value = 'wrong'")
    page.evaluate("document.querySelector('#login').requestSubmit()")
    page.wait("document.querySelector('#login-problem').innerText.includes('not valid')")
    page.evaluate(f"document.querySelector('#token').value = {TOKEN!r}")
    page.evaluate("document.querySelector('#login').requestSubmit()")
    page.wait("document.querySelector('#connection').innerText.startsWith('live')")
    page.problems.clear()  # the browser reports each 401
    calls = load(server)
    page.wait("Number(document.body.dataset.steps) > 90")
    page.wait("document.querySelectorAll('#running progress').length === 8")
    assert page.text("#running-count") == "8"
    assert int(page.text("#waiting-count")) > 0
    page.wait("Number(document.querySelector('#tokens-per-second').innerText) > 0")
    assert "in use" in page.text("#pools .worker")
    assert page.text("#skipped") == "0"
    page.wait("document.querySelector('#first-token').innerText.includes(' / ')")
    page.wait("Number(document.querySelector('#finished-per-second').innerText) > 0")
    assert page.text("#between-tokens").count(" ms") == 2
    assert page.evaluate("document.querySelectorAll('#history canvas').length") == 4
    assert "joined" in page.text("#workers")
    box = page.evaluate("JSON.stringify(document.querySelector('#timelines canvas').getBoundingClientRect())")
    canvas = json.loads(box)
    page.evaluate("document.querySelector('#pause').click()")
    page.click(canvas["right"] - 60, canvas["top"] + 10)
    page.wait("!document.querySelector('#mask-title').innerText.includes('newest')")
    assert "prefill" in page.text("#rows") or "decode" in page.text("#rows")
    colours = page.evaluate(
        """new Set(Array.from(new Uint32Array(document.querySelector('#timelines canvas').getContext('2d')
        .getImageData(0, 0, 1200, 100).data.buffer))).size"""
    )
    assert colours > 4, "the picture has prefill, decode, cached and idle cells"
    if IMAGES:
        page.screenshot(Path(IMAGES) / "status-page.png")
        page.resize(1280, 1280, dark=True)
        page.wait("matchMedia('(prefers-color-scheme: dark)').matches")
        time.sleep(0.3)
        page.screenshot(Path(IMAGES) / "status-page-dark.png")
    assert page.problems == []
    assert TOKEN not in page.evaluate("location.href + document.documentElement.innerHTML")
    for call in calls:
        call.cancel()
