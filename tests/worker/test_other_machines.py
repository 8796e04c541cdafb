"""Tests of kernels, weights and tokens as other machines run them, each machine in a process of its own.

CONTRIBUTING.md has the command that runs every test without AVX-512 and AMX.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNELS = ("test_linear.py", "test_weight_layout.py", "test_kernel_selection.py", "test_fused_decoder.py")
WITHOUT_KERNELS = ("test_linear.py", "test_fused_decoder.py")
FAMILIES = "not (fused_tokens or best_library or within_rounding) or llama or olmo2"
"""Two families show what the instruction sets change."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def run(files: tuple[str, ...], *, hidden: str, **environment: str) -> str:
    """Run the files with parts of the machine hidden. Returns the output of pytest."""
    options = ["-x", "-p", "worker.pretended_machine", "-p", "no:cacheprovider", "-k", FAMILIES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(TESTS / "worker" / file) for file in files)],
        env=os.environ | environment | {"PRETEND": hidden, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], "all were skipped"
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hides instruction sets of x86-64")
def test_one_core_without_avx512_and_amx() -> None:
    written = run(KERNELS, hidden="cores", **AVX2)
    assert "oneDNN without bfloat16" in written
    assert "avx512" not in written.partition("libraries [")[2].partition("]")[0]
    assert "cores 1\n" in written


def test_without_compiler_and_huge_pages() -> None:
    written = run(WITHOUT_KERNELS, hidden="kernels huge_pages", **SSE)
    assert "oneDNN without bfloat16" in written or platform.machine() != "x86_64"
    assert "libraries [], " in written
