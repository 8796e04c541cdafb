"""Pytest plugin that hides parts of this machine: `-p worker.pretended_machine`.

PRETEND lists the parts: `cores` (all but one), `kernels` (an installation without a compiler) and `huge_pages` (a Linux
kernel without them). ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA hide instruction sets.
"""

from __future__ import annotations

import errno
import mmap
import os

import torch

HIDDEN = os.environ["PRETEND"].split()


class _MapWithoutHugePages(mmap.mmap):
    def madvise(self, *_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


# At import: a conftest.py already reads the list of libraries.
if "cores" in HIDDEN:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if "huge_pages" in HIDDEN:
    mmap.mmap = _MapWithoutHugePages  # type: ignore[misc]

from lineclear.worker.kernels import native_library  # noqa: E402

if "kernels" in HIDDEN:
    native_library.candidates = list
    os.environ["PATH"] = os.devnull


def pytest_report_header() -> str:
    """Describe the machine that the tests see."""
    return (
        f"machine: torch {torch.backends.cpu.get_cpu_capability()},"
        f" oneDNN {'with' if native_library.onednn_packs(torch.bfloat16) else 'without'} bfloat16,"
        f" libraries [{' '.join(native_library.candidates())}], cores {len(os.sched_getaffinity(0))}"
    )
