"""Check that `make` compiles all modules that a server imports, also if the environment disables it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS


def recipe(*variables: str) -> list[str]:
    """Return the commands that `make` runs to set up an environment."""
    command = ["make", "--dry-run", "--always-make", *variables, f"{sys.prefix}/ready"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    return done.stdout.splitlines()


def test_modules_are_compiled_despite_the_environment(tmp_path: Path) -> None:
    (tmp_path / "fresh.py").write_text("")
    (line,) = (line for line in recipe(f"VENV={sys.prefix}", "SERVED=import fresh") if "import fresh" in line)
    disabling = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "elsewhere")}
    environment = os.environ | disabling | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(line, shell=True, env=environment, check=True, timeout=PATIENCE_SECONDS)
    assert list((tmp_path / "__pycache__").glob("fresh.*.pyc"))


def test_set_up_imports_scheduler_and_worker() -> None:
    (line,) = (line for line in recipe(f"VENV={sys.prefix}") if "import lineclear" in line)
    for module in ("lineclear.scheduler.app", "lineclear.worker.app", "lineclear.worker.runner.runner_factory"):
        assert module in line
