"""docs/request-lifecycle.md names exactly the modules that a request enters.

A client, a scheduler and a worker run as real processes. A profile function (`sys.setprofile`) records each module
whose code runs during two requests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_harness import ENVIRONMENT
from support.service import running
from support.sources import REPOSITORY, ROOTS
from support.time_limits import PATIENCE_SECONDS

PAGE = REPOSITORY / "docs/request-lifecycle.md"

BACKGROUND = frozenset(
    {
        *("lineclear.errors", "lineclear.scheduler.app", "lineclear.scheduler.stall_watchdog"),
        *("lineclear.scheduler.grpc_api.server", "lineclear.scheduler.grpc_api.health_service"),
        *("lineclear.scheduler.core.invariants", "lineclear.worker.kv_cache.kv_prefault"),
        *("lineclear.worker.device.memory_budget", "lineclear.worker.device.host_info", "lineclear.worker.cpu.linear"),
    }
)
"""Modules that run with or without a request: errors, watchdog, health, work in idle time; and products of torch, which
only some processors need."""
SECTION_OF_OTHERS = "## Modules beside the path"
"""The rest of the page names modules that a plain request does not enter."""

TRACE = """
import os, sys, threading, time
folder, seen, recording = os.environ["TRACE_FOLDER"], set(), False
os.close(output := os.open(f"{folder}/{os.getpid()}.modules", os.O_CREAT | os.O_WRONLY))

def on_event(frame, event, argument):
    if recording and event == "call" and (name := frame.f_globals.get("__name__")) not in seen:
        seen.add(name)
        if isinstance(name, str) and name.startswith("lineclear.") and frame.f_code.co_name != "<module>":
            with open(f"{folder}/{os.getpid()}.modules", "a") as output:
                output.write(name + "\\n")

def watch():
    global recording
    while not os.path.exists(f"{folder}/start"):
        time.sleep(0.02)
    recording = True
    open(f"{folder}/{os.getpid()}.recording", "w").close()
    while not os.path.exists(f"{folder}/end"):
        time.sleep(0.02)
    recording = False

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(on_event)
sys.setprofile(on_event)
"""
"""Runs as sitecustomize in each process. The first requests of a process are not recorded: they import modules."""

CLIENT = """
import os, pathlib, sys, time
from lineclear.client import Client
folder, target = pathlib.Path(os.environ["TRACE_FOLDER"]), sys.argv[1]

def ask(client):
    with client.stream("The capital of France is", max_tokens=8, temperature=0.8, seed=3, stop=["xyz"]) as stream:
        assert len(list(stream)) > 1
    client.generate([{"role": "user", "content": "Hello"}], max_tokens=4)

with Client(target) as client:
    ask(client)
    (folder / "start").touch()
    while any(not path.with_suffix(".recording").exists() for path in folder.glob("*.modules")):
        time.sleep(0.02)
    ask(client)
    (folder / "end").touch()
"""


KERNELS = REPOSITORY / "gpu_worker/lineclear/worker/kernels"


@pytest.fixture
def entered(tmp_path: Path) -> set[str]:
    """Return the modules that two requests entered in any process."""
    (tmp_path / "sitecustomize.py").write_text(TRACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACE_FOLDER", str(tmp_path))
        path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
        patch.setenv("PYTHONPATH", path)
        patch.setitem(ENVIRONMENT, "PYTHONPATH", path)
        with running() as service:
            command = [sys.executable, "-c", CLIENT, service.target]
            subprocess.run(command, check=True, timeout=PATIENCE_SECONDS)
    return {name for path in tmp_path.glob("*.modules") for name in path.read_text().split()}


def modules(text: str) -> set[str]:
    """Return the modules whose files `text` names, each by the end of its path; an unknown name is an error."""
    known = {
        p.relative_to(root).as_posix(): ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for root in ROOTS
        for p in root.rglob("*.py")
    }
    found = set()
    for named in re.findall(r"`((?!tests/)[\w./]+\.py)`", text):
        candidates = {module for path, module in known.items() if f"/{path}".endswith(f"/{named}")}
        assert len(candidates) == 1, f"{named} names {sorted(candidates)}"
        found |= candidates
    return found


@pytest.mark.skipif(not list(KERNELS.glob("*.so")), reason="the page names the modules of a worker with native kernels")
def test_page_names_the_modules_of_a_request(entered: set[str]) -> None:
    path, _, others = PAGE.read_text(encoding="utf-8").partition(SECTION_OF_OTHERS)
    assert others
    assert entered - modules(path) - BACKGROUND == set(), "name these in docs/request-lifecycle.md"
    assert modules(path) - entered == set(), "a request does not enter these"
    modules(others)
