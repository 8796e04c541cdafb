"""buf, the schema's linter and a command-line client: from the machine, or once through npm into the environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.time_limits import PATIENCE_SECONDS

PACKAGE = "@bufbuild/buf@1.75.0"


@cache
def find_buf() -> str:
    """Its path. Skips the test where there is neither buf nor npm."""
    installed = shutil.which("buf")
    if installed is not None:
        return installed
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("neither buf nor npm is installed")
    home = Path(sys.prefix) / "buf"
    binary = home / "node_modules/.bin/buf"
    if not binary.exists():
        home.mkdir(exist_ok=True)
        command = [npm, "install", "--prefix", str(home), "--no-save", "--no-audit", "--no-fund", "--silent", PACKAGE]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS, cwd=home)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm could not install {PACKAGE}: {type(error).__name__}")
    return str(binary)
