"""No process leaves a core file: its memory has secrets and prompts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.processes import Running
from support.time_limits import PATIENCE_SECONDS


def core_limit(pid: int) -> list[str]:
    """The soft and the hard limit of a process for core files."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line for line in lines if line.startswith("Max core file size")).split()[4:6]


def test_processes_write_no_core_file(start: Callable[..., Running]) -> None:
    server = start()
    worker = server.wait_for("worker_started")["pid"]
    assert core_limit(server.popen.pid) == core_limit(worker) in (["0", "0"], ["1", "1"])


def test_core_limit_also_stops_piped_core_dumps() -> None:
    """With a pipe as core_pattern, Linux ignores a limit of 0 and obeys a limit of exactly 1."""
    code = (
        "import resource\n"
        "from lineclear.process import core_dumps\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_CORE)\n"
        "core_dumps.disable()\n"
        "expected = 0 if hard == 0 else 1\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (expected, expected)\n"
        "core_dumps.disable()\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "core_dumps.disable()\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


def test_separate_worker_writes_no_core_file() -> None:
    """As in a separate container, where it inherits no limit."""
    code = (
        "import sys, types\n"
        "serving = types.ModuleType('lineclear.worker.app')\n"
        "serving.serve = lambda *arguments: print(open('/proc/self/limits').read()) or 0\n"
        "sys.modules[serving.__name__] = serving\n"
        "from lineclear.worker.main import main\n"
        "main([])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("Max core file size"))
    assert line.split()[4:6] in (["0", "0"], ["1", "1"])
