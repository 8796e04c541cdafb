"""Install npm packages for tests, once, into the virtual environment. buf checks schemas, and has `buf curl`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support import npm
from support.time_limits import PATIENCE_SECONDS


@cache
def install(name: str, *packages: str) -> Path:
    """Return the folder whose node_modules contains `packages`. Skips the test if npm is missing or fails."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    home = Path(sys.prefix) / name
    mark = home / "installed"
    if not mark.exists() or mark.read_text() != " ".join(packages):
        home.mkdir(exist_ok=True)
        command = [npm, "install", "--prefix", str(home), "--no-save", "--no-audit", "--no-fund", "--silent"]
        command += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", *packages]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS, cwd=home)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm could not install {' '.join(packages)}: {type(error).__name__}")
        mark.write_text(" ".join(packages))
    return home


PACKAGE = "@bufbuild/buf@1.75.0"


@cache
def find_buf() -> str:
    """Return the path of buf. Skips the test if neither buf nor npm is installed."""
    return shutil.which("buf") or str(npm.install("buf", PACKAGE) / "node_modules/.bin/buf")
