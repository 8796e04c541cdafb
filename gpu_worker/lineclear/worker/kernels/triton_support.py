"""Whether Triton's kernels can be used: torch for CUDA brings the package, and its launchers need a C compiler."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import structlog

log = structlog.get_logger(__name__)


@cache
def is_usable() -> bool:
    """Return whether Triton is installed and has a C compiler. The first answer is logged if that is missing."""
    if not find_spec("triton"):
        return False
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return True
    log.warning("triton_not_used", hint="Triton builds launchers with a C compiler: install gcc, or set CC")
    return False
