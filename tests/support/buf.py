"""Find buf (schema linter, breaking-change check, `buf curl`), or install it with npm."""

from __future__ import annotations

import shutil
from functools import cache

from support import npm

PACKAGE = "@bufbuild/buf@1.75.0"


@cache
def find_buf() -> str:
    """Return the path of buf. Skips the test if neither buf nor npm is installed."""
    return shutil.which("buf") or str(npm.install("buf", PACKAGE) / "node_modules/.bin/buf")
