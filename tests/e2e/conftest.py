"""Kernel fixtures for the tests of this folder."""

from __future__ import annotations

from support.kernel_variants import best_and_none, each_library, each_way

__all__ = ["best_and_none", "each_library", "each_way"]
