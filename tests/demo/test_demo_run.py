"""`make demo`: three ways of batching the same prompts, and the pictures of the README. Here with the tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.engine_harness import eventually
from support.sockets import free_ports
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import Client, HealthStatus
from lineclear.errors import LineclearError

REPOSITORY = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
WITHOUT_LINECLEAR = os.environ | {"PATH": "/usr/bin:/bin"}
"""An environment as that of a newcomer: `lineclear` is not on the PATH."""
LENGTHS = (6, 50, 300, 30, 180, 45)


@pytest.fixture(scope="module", name="demo")
def run_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what the demo printed, and the folder with its pictures."""
    images = tmp_path_factory.mktemp("images")
    done = subprocess.run(
        [sys.executable, "demo/run.py", "--model", "demo/model-tiny", "--images", str(images)],
        cwd=REPOSITORY, env=WITHOUT_LINECLEAR, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, images


def section(text: str, begin: str, end: str) -> str:
    """Return the lines from `begin` to the next `end`."""
    return text.partition(begin)[2].partition(end)[0]


def test_table_compares_three_ways_with_the_same_tokens(demo: tuple[str, Path]) -> None:
    assert "The 3 outputs are equal, token for token." in demo[0]
    table = section(demo[0], "611 output tokens\n", "The 3 outputs").splitlines()
    rows = {line[:40].strip(): line[40:].split() for line in table[1:] if line.strip()}
    assert list(rows) == [
        "continuous (lineclear)", "static (lineclear, fixed_size)", "static, padded (transformers generate)"
    ]  # fmt: skip
    continuous, static, padded = rows.values()
    assert 300 <= int(continuous[0]) < 480
    assert int(static[0]) == int(padded[0]) == 300 + 180
    after_the_end = sum(300 - n for n in LENGTHS[:3]) + sum(180 - n for n in LENGTHS[3:])
    assert (continuous[2], static[2]) == ("0", "0")
    assert int(padded[2]) > after_the_end  # and in front of the shorter prompts


def test_admission_log_shows_barriers_of_static_batches_only(demo: tuple[str, Path]) -> None:
    log = section(demo[0], "Admission log", "attention")
    continuous = section(log, "Continuous batching", "Static batching")
    static = section(log, "Static batching without padding", "Static batching in padded waves")
    padded = section(log, "Static batching in padded waves", "\n\n")
    assert "barrier" not in continuous
    for one in (continuous, static, padded):
        assert sorted(re.findall(r"\[(\d)\] enters slot", one)) == ["1", "2", "3", "4", "5", "6"]
    for one in (static, padded):
        assert [int(step) for step in re.findall(r"step +(\d+)  =+ barrier", one)] == [300, 480]
        assert "slot 0 for 294 steps, slot 1 for 250 steps" in one
    assert "padding tokens" in padded
    assert "padding tokens" not in static


def test_mask_has_decodes_beside_a_prompt(demo: tuple[str, Path]) -> None:
    mask = section(demo[0], "in one packed row, no padding", "Same 6 prompts")
    queries = [line for line in mask.splitlines() if line.startswith("[")]
    blocks = [re.findall(r"[▒█·]+", line) for line in queries]
    own = {line[: line.index("]") + 1]: index for index, line in enumerate(dict.fromkeys(q[:3] for q in queries))}
    assert {line.split()[1] for line in queries} == {"decode", "prefill"}
    for line, cells in zip(queries, blocks, strict=True):
        seen = [index for index, cell in enumerate(cells) if set(cell) - {"·"}]
        assert seen == [own[line[:3]]], f"{line!r} sees keys of other requests"


def test_timeline_has_padded_waves_above_continuous_batching(demo: tuple[str, Path]) -> None:
    root = ET.parse(demo[1] / "timeline.svg").getroot()
    padded, continuous, _ = list(root.iter(f"{SVG}g"))
    marks = [{rect.get("class") for rect in group.iter(f"{SVG}rect")} for group in (padded, continuous)]
    assert marks[0] >= {"prefill", "decode", "padding", "end"}
    assert "padding" not in marks[1]
    titles = ["".join(group.itertext()) for group in (padded, continuous)]
    assert "padded waves" in titles[0]
    assert "Continuous batching" in titles[1]


@pytest.mark.parametrize("name", ["timeline.svg", "mask.svg"])
def test_readme_shows_the_pictures_of_the_demo(demo: tuple[str, Path], name: str) -> None:
    """The committed pictures have the style of today's."""
    pictures = (REPOSITORY / "docs" / "images" / name, demo[1] / name)
    committed, made = (next(ET.parse(path).getroot().iter(f"{SVG}style")).text for path in pictures)
    assert committed == made, "run: make demo ARGS='--images docs/images'"


def is_serving(client: Client) -> bool:
    with contextlib.suppress(LineclearError):
        return client.health() is HealthStatus.SERVING
    return False


def test_closing_commands_run_as_they_are_printed(demo: tuple[str, Path]) -> None:
    """Only the port is another, which may be in use here, and the worker is a toy, which starts at once."""
    lines = section(demo[0], "Where to go next\n", "$").splitlines()
    serve, top, page = (re.split(r"  +", line.strip())[0] for line in lines)
    assert (REPOSITORY / page).is_file()
    listen = free_ports(1)[0]
    with socket.socket() as probe:  # the demo's admin address is behind that of gRPC
        probe.bind(("127.0.0.1", listen + 1))
    environment = WITHOUT_LINECLEAR | {
        "LINECLEAR_LISTEN": f"127.0.0.1:{listen}",
        "LINECLEAR_WORKER_COMMAND": f"{sys.executable} -m support.toy_worker_command",
        "TOY_OPTIONS": json.dumps({"vocab_size": 4096}),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    assert "50052" in top
    top = top.replace("50052", str(listen + 1))
    server = subprocess.Popen(["/bin/sh", "-c", f"exec {serve}"], cwd=REPOSITORY, env=environment)
    try:
        with Client(f"127.0.0.1:{listen}") as client:
            eventually(lambda: is_serving(client))
        shown = subprocess.run(
            ["/bin/sh", "-c", top], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
            timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert (shown.returncode, "slots" in shown.stdout) == (0, True), shown.stderr
    finally:
        server.terminate()
        assert server.wait(PATIENCE_SECONDS) == 0
