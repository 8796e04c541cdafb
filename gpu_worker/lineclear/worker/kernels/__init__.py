"""The C++ kernels beside this file, one library for each instruction set: which there are, and the one that is used.

They are built with the package where there is a compiler (`hatch_build.py` at the top of the repository). Without one,
or where `choose` has been told so, `library()` is None, and the worker computes the same with torch, slower.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""Element types the kernels compute in, by their number in the C interface."""
LANES = 16
"""Widths are multiples of it."""
LARGEST_HEAD = 512
AUTO, NONE = "auto", "none"
"""What `choose` takes beside names of libraries."""

_ABI = 9
_FOLDER = Path(__file__).parent
_INTEGER, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
FUNCTIONS: dict[str, list[Any]] = {
    "lineclear_queries_per_item": [_INTEGER] * 2,
    "lineclear_attend": [_POINTER] * 6,
    "lineclear_add_norm": [*[_INTEGER] * 3, _POINTER, _REAL, _POINTER, _POINTER, _REAL, _POINTER],
    "lineclear_split_heads": [*[_INTEGER] * 6, *[_POINTER] * 5, _INTEGER, _REAL, *[_POINTER] * 3],
    "lineclear_gate": [*[_INTEGER] * 4, *[_POINTER] * 2],
    "lineclear_best": [*[_INTEGER] * 3, *[_POINTER] * 3],
    "lineclear_widening_pays": [],
    "lineclear_bf16_size": [_INTEGER] * 2,
    "lineclear_bf16_lay_out": [*[_INTEGER] * 2, *[_POINTER] * 2],
    "lineclear_bf16_product": [*[_INTEGER] * 3, *[_POINTER] * 4],
    "lineclear_int8_product": [_POINTER, _INTEGER, _INTEGER, *[_POINTER] * 2],
    "lineclear_take_rows": [*[_INTEGER] * 2, *[_POINTER] * 3],
    "lineclear_play": [_POINTER, _INTEGER, _POINTER],
}
"""The types of each one's arguments."""
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
# Best first: the library, and what the processor must be able to do for it.
_X86 = (
    ("x86_64_avx512bf16", {*_AVX512, "avx512_vnni", "avx512_bf16"}),
    ("x86_64_avx512vnni", {*_AVX512, "avx512_vnni"}),
    ("x86_64_avx512", _AVX512),
    ("x86_64_avx2", {"avx2", "fma"}),
    ("x86_64_fma", {"fma"}),
)


def candidates() -> list[str]:
    """Names of the libraries that are built and that this processor can run, best first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        flags = _x86_flags()
        names = [name for name, needed in _X86 if needed <= flags]
    else:
        names = [machine]
    return [name for name in names if _path(name).exists()]


def choose(name: str) -> None:
    """From now on the library is this one of the `candidates()`, the best of them (AUTO), or none (NONE).

    For the whole process, before anything is built that calls it. Raises ValueError, naming those there are.
    """
    global _chosen
    if name not in (AUTO, NONE) and (name not in candidates() or load(name) is None):
        raise ValueError(f"there are no kernels {name!r} here; there are {', '.join((AUTO, NONE, *candidates()))}")
    _chosen = name


def library() -> Any | None:
    """The library in use, or None."""
    return _library(_chosen)


def multiplies_bfloat16() -> bool:
    """Whether products with bf16 weights are faster through `lineclear_bf16_product` than through oneDNN here."""
    return _multiplies_bfloat16(_chosen) and not _has_amx()


def multiplies_few_bfloat16() -> bool:
    """Whether they are faster for few rows only: oneDNN multiplies many rows with AMX."""
    return _multiplies_bfloat16(_chosen) and _has_amx()


def library_name() -> str:
    """Which one `library()` is, as `x86_64_avx512bf16`; empty for none."""
    found = library()
    return "" if found is None else Path(found._name).stem.removeprefix("lineclear_")


def load(name: str) -> Any | None:
    """One library by name; None when it cannot be loaded or is of another release."""
    try:
        # torch is imported by now, so its OpenMP runtime is loaded and ours is the same one: one pool of threads.
        found = ctypes.CDLL(str(_path(name)))
        if int(found.lineclear_abi()) != _ABI:
            return None
    except (OSError, AttributeError):
        return None
    for function, arguments in FUNCTIONS.items():
        getattr(found, function).restype = None
        getattr(found, function).argtypes = arguments
    for function in ("lineclear_queries_per_item", "lineclear_widening_pays", "lineclear_bf16_size"):
        getattr(found, function).restype = _INTEGER
    return found


_chosen = AUTO


@cache
def _library(chosen: str) -> Any | None:
    names = {AUTO: candidates(), NONE: []}.get(chosen, [chosen])
    return next((found for name in names if (found := load(name)) is not None), None)


@cache
def _multiplies_bfloat16(chosen: str) -> bool:
    found = _library(chosen)
    return found is not None and bool(found.lineclear_widening_pays())


def _has_amx() -> bool:
    return "amx_bf16" in _x86_flags()


def _path(name: str) -> Path:
    return _FOLDER / f"lineclear_{name}.so"


def _x86_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
