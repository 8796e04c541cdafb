"""The benchmarks are a package at the root of the repository, which is on the path of no installed thing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
