"""top, trace and explain beside a real scheduler: what a user sees in a terminal, in a pipe and in a file."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client.command import spawn
from client.terminal import Terminal
from support.service import is_idle, wait_for
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import ToyService

from lineclear.client import AdminClient, Client
from lineclear.errors import LineclearError
from lineclear.v1 import steps_pb2 as pb

SLOW = {"min_step_seconds": 0.03, "max_step_seconds": 0.03, "num_blocks": 90, "block_size": 64, "max_model_len": 2000}
PROMPT = [5, 6, 7, 8, 9]
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
SVG = "{http://www.w3.org/2000/svg}"


class Watched(ToyService):
    """A toy service with three slots and an admin address."""

    def __init__(self, folder: Path) -> None:
        self.admin = f"unix:{folder}/admin.sock"
        super().__init__(folder, "--admin-listen", self.admin, "--max-batch-size", "3", **SLOW)

    def start_if_killed(self) -> None:
        if self._process is None:
            self.start()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The service of all tests here. A test may kill it."""
    service = Watched(tmp_path_factory.mktemp("watched"))
    yield service
    service.kill()


@pytest.fixture
def service(shared: Watched) -> Watched:
    shared.start_if_killed()
    with Client(shared.admin) as admin:
        wait_for(lambda: is_idle(admin.stats()), "no request of another test is left")
    return shared


@pytest.fixture(name="load")
def keep_busy(service: Watched) -> Iterator[None]:
    """Five endless requests for three slots, until the test ends."""
    with Client(service.target, max_attempts=1) as client, Client(service.admin) as admin:
        streams = [client.stream([*PROMPT, n], **ENDLESS) for n in range(5)]
        threads = [threading.Thread(target=_read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        wait_for(lambda: admin.stats().gauges.num_requests_waiting == 2, "two requests wait")
        yield
        for stream in streams:
            stream.cancel()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)


def _read(stream: Any) -> None:
    with contextlib.suppress(LineclearError), stream:  # cancelled by the fixture, or cut off by the test
        for _ in stream:
            pass


def generate(service: Watched, *prompts: list[int], max_tokens: int = 4) -> None:
    with Client(service.target) as client:
        client.generate_batch(list(prompts), max_tokens=max_tokens, ignore_eos=True)


def slots(screen: list[str]) -> list[str]:
    return [line for line in screen if re.match(r"  slot +\d", line)]


@pytest.mark.usefixtures("load")
def test_top_shows_queue_slots_and_blocks(service: Watched) -> None:
    with Terminal("top", "--target", service.admin, "--interval", "0.1") as terminal:
        screen = terminal.read_until(lambda screen: len(slots(screen)) == 3)
        text = "\n".join(screen)
        assert "queue 2 waiting" in text
        assert "slots 3 of 3 in use" in text
        assert all(re.search(r"\[\d+\] ▒*█*·+ \d+/1500 tokens, prompt 6", line) for line in slots(screen)), text
        assert "KV blocks 90 of 64 tokens" in text
        used = int(re.search(r"█ (\d+) in use", text)[1])  # type: ignore[index]
        map_line = screen[next(n for n, line in enumerate(screen) if "KV blocks" in line) + 1].strip()
        assert len(map_line) == 90
        assert map_line.count("█") == used > 0
        terminal.read_until(lambda screen: re.search(r"tokens/s [1-9]", "\n".join(screen)))
        progress = re.search(r"(\d+)/1500", slots(screen)[0])
        assert progress is not None
        terminal.read_until(lambda screen: slots(screen) and f"{progress[1]}/1500" not in slots(screen)[0])  # it moves
        assert terminal.end(signal.SIGINT) == 130
        assert terminal.is_restored


@pytest.mark.usefixtures("load")
def test_top_fits_the_terminal_after_a_resize(service: Watched) -> None:
    with Terminal("top", "--target", service.admin, "--interval", "10", columns=120, rows=40) as terminal:
        terminal.read_until(slots)
        terminal.resize(44, 9)
        # The screen is redrawn for the new size; what it shows of the server may be up to ten seconds old.
        # Until then, the terminal has the old screen, or a part of it.
        terminal.read_until(
            lambda screen: (
                len(screen) <= 9
                and max(map(len, screen), default=0) <= 44
                and ("and 3 more" in "\n".join(screen) or slots(screen))
            )
        )
        terminal.resize(1, 1)
        terminal.resize(100, 30)
        terminal.read_until(lambda screen: len(slots(screen)) == 3)
        assert terminal.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert terminal.is_restored


@pytest.mark.usefixtures("load")
def test_top_prints_once_into_a_pipe(service: Watched, cli: Any) -> None:
    done = cli("top", "--target", service.admin)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert len(slots(done.stdout.splitlines())) == 3
    assert "queue 2 waiting" in done.stdout
    assert re.search(r"tokens/s [1-9]", done.stdout)


@pytest.mark.parametrize("name", ["top", "explain", "trace"])
def test_data_address_has_no_admin_methods(service: Watched, cli: Any, name: str, tmp_path: Path) -> None:
    rest = ["--output", str(tmp_path / "t.json")] if name == "trace" else []
    done = cli(name, "--target", service.target, *rest)
    assert done.exit_code > 100
    assert done.stderr.count("\n") <= 3
    assert "admin" in done.stderr


def records(service: Watched) -> list[pb.StepRecord]:
    """Return the steps that the server keeps."""
    with Client(service.admin) as client:
        return [*next(AdminClient(client).watch_steps(history=1000)).steps]


def test_explain_shows_the_last_step(service: Watched, cli: Any) -> None:
    generate(service, PROMPT)
    (*_, last) = records(service)
    done = cli("explain", "--target", service.admin)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Step {last.step} of worker 0")
    assert "1 queries of 1 requests in one packed row, no padding" in done.stdout
    assert re.search(r"^0 +0  \[\d+\] +decode +7 +0 +1  a token$", done.stdout, re.M), done.stdout
    assert re.search(r"decode +pos 7 +▒{7}█$", done.stdout, re.M)
    found = json.loads(cli("explain", "--json", "--target", service.admin).stdout)
    assert (found["rows"]["kind"], found["num_slots"]) == (["ROW_KIND_DECODE"], 3)


def test_explain_shows_a_prompt_with_its_mask(service: Watched, cli: Any, tmp_path: Path) -> None:
    prompt = [11, *PROMPT]  # which no other test leaves in the cache
    generate(service, prompt)
    first = next(record for record in records(service) if sum(record.rows.num_tokens) == len(prompt))
    image = tmp_path / "mask.svg"
    done = cli("explain", str(first.step), "--target", service.admin, "--svg", str(image))
    assert re.search(r"^0-5 +0  \[\d+\] +prefill +0-5 +0 +1  a token$", done.stdout, re.M), done.stdout
    assert [re.sub("[^█▒·]", "", line) for line in done.stdout.splitlines() if " pos " in line] == [
        "█·····", "██····", "███···", "████··", "█████·", "██████"
    ]  # fmt: skip
    squares = [rect for rect in ET.parse(image).getroot().iter(f"{SVG}rect") if rect.get("width") == "13"]
    assert len(squares) == 36


def test_explain_names_the_steps_that_are_kept(service: Watched, cli: Any) -> None:
    generate(service, PROMPT)
    steps = [record.step for record in records(service)]
    for arguments, says in (
        (("--worker", "7"), "no step of worker 7 is kept; there are steps of worker 0"),
        (("4000000",), f"there are steps {min(steps)} to {max(steps)}"),
    ):
        done = cli("explain", *arguments, "--target", service.admin)
        assert done.exit_code == 1
        assert says in done.stderr


@pytest.mark.usefixtures("load")
def test_trace_has_a_slice_for_each_row(service: Watched, cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = cli("trace", "--target", service.admin, "--seconds", "1", "--output", str(file))
    assert (done.exit_code, done.stderr) == (0, "")
    steps = int(re.match(r"(\d+) steps of 1 worker", done.stdout)[1])  # type: ignore[index]
    slices = [event for event in json.loads(file.read_text()) if event["ph"] == "X"]
    assert sum(event["tid"] == 0 for event in slices) == steps > 5
    assert {event["tid"] for event in slices} == {0, 1, 2, 3}
    for tid in range(4):
        lane = [(event["ts"], event["dur"]) for event in slices if event["tid"] == tid]
        assert all(a + d <= b for (a, d), (b, _) in itertools.pairwise(lane)), "slices of a slot overlap"


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, None])
def test_trace_is_kept_when_it_ends(service: Watched, tmp_path: Path, ended_by: signal.Signals | None) -> None:
    """By Ctrl-C, by SIGTERM as of `timeout 60 lineclear trace ...`, or because the server stops."""
    file = tmp_path / "trace.json"
    process = spawn("trace", "--target", service.admin, "--output", str(file))
    wait_for(lambda: file.exists() and file.stat().st_size > 10_000, "the trace grows")
    if ended_by is None:
        service.kill()
    else:
        process.send_signal(ended_by)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert b"the recording ended early" in err if ended_by is None else err == b""
    steps = int(out.split()[0])
    assert sum(event["ph"] == "X" and event["tid"] == 0 for event in json.loads(file.read_text())) == steps


def test_timeline_of_the_history(service: Watched, cli: Any, tmp_path: Path) -> None:
    generate(service, [*PROMPT, 1], [*PROMPT, 2], max_tokens=6)
    file = tmp_path / "timeline.svg"
    done = cli("trace", "--target", service.admin, "--history", "1000", "--seconds", "0.5", "--output", str(file))
    assert done.exit_code == 0, done.stderr
    marks = [rect.get("class") for rect in ET.parse(file).getroot().iter(f"{SVG}rect")]
    assert {"prefill", "decode", "end", "idle"} <= set(marks)


def test_trace_without_a_step_replaces_no_file(service: Watched, cli: Any, tmp_path: Path) -> None:
    absent = f"unix:{tmp_path}/none.sock"
    (tmp_path / "trace.json").write_text("[1]")
    for target, name, code, says in (
        (service.admin, "trace.json", 1, "the server is idle"),
        (service.admin, "trace.svg", 1, "the server is idle"),
        (absent, "trace.json", 114, absent),
        (absent, "no/trace.json", 2, "there is no folder"),
        (absent, "trace.png", 2, "ends with .json or .svg"),
    ):
        done = cli("trace", "--target", target, "--seconds", "0.1", "--output", str(tmp_path / name))
        assert (done.exit_code, says in "".join(done.stderr.split("\n"))) == (code, True), done.stderr
    assert (tmp_path / "trace.json").read_text() == "[1]"


def test_top_waits_for_a_server_that_is_away(shared: Watched, cli: Any) -> None:
    def shows(text: str) -> Any:
        return lambda screen: any(text in line for line in screen)

    shared.kill()
    with Terminal("top", "--target", shared.admin, "--interval", "0.1", columns=250) as terminal:
        terminal.read_until(shows(f"waiting for {shared.admin}"))
        shared.start()
        terminal.read_until(shows("slots 0 of 3"))
        of_new_server = cli("explain", "--target", shared.admin)
        assert (of_new_server.exit_code, "no step yet" in of_new_server.stderr) == (1, True)
        shared.kill()
        terminal.read_until(shows("waiting for"))
        shared.start()
        terminal.read_until(lambda screen: not shows("waiting for")(screen))
        assert terminal.end(signal.SIGINT) == 130
        assert terminal.is_restored
