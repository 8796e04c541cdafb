"""Where set-up puts Triton: not among the packages, because torch imports it from there into each worker."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "triton"
