"""promtool and Prometheus, if they are installed, and the rule file that deploy/monitoring says how to make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

MONITORING = REPOSITORY / "deploy/monitoring"
RULES = "lineclear-alerts.yaml"
MAKE_RULES = f"sed '1,/^spec:/d; s/^  //' prometheus-rule.yaml > {RULES}"


def program(name: str) -> str:
    """Return the path of `promtool` or `prometheus`. Skips the test without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def rule_file(folder: Path) -> Path:
    """Make the rule file in `folder` by the command of the documentation."""
    path = folder / RULES
    command = MAKE_RULES.replace(f"> {RULES}", f"> {path}")
    subprocess.run(command, shell=True, check=True, cwd=MONITORING, timeout=PATIENCE_SECONDS)
    return path
