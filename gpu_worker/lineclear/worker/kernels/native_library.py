"""Loads and chooses the C++ kernel libraries beside this file, one for each instruction set.

`hatch_build.py` builds them when the package is installed, if the machine has a compiler. Without a library, or after
`choose(NONE)`, `selected_library()` returns None and the worker computes the same with torch, slower.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch

log = structlog.get_logger()

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""Element types of the kernels and their numbers in the C interface."""
LANES = 16
"""Head dimensions, hidden sizes and block sizes must be multiples of this."""
MAX_HEAD_DIM = 512
MAX_EXPERTS = 1024
AUTO, NONE = "auto", "none"
"""Further names that `choose` accepts: the best library, or none."""

_ABI = 18
_HINT = "answers are slower; build the kernels again: pip install --no-build-isolation --no-deps -e . in the checkout"
_FOLDER = Path(__file__).parent
_INTEGER, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
FUNCTIONS: dict[str, list[Any]] = {
    "lineclear_queries_per_item": [_INTEGER] * 2,
    "lineclear_paged_attention": [_POINTER] * 6,
    "lineclear_add_norm": [*[_INTEGER] * 3, _POINTER, _REAL, *[_POINTER] * 3, _REAL, _POINTER],
    "lineclear_split_heads": [*[_INTEGER] * 8, *[_POINTER] * 5, _INTEGER, _REAL, *[_POINTER] * 3],
    "lineclear_activation": [*[_INTEGER] * 5, *[_POINTER] * 2],
    "lineclear_argmax": [*[_INTEGER] * 3, *[_POINTER] * 3],
    "lineclear_cap": [*[_INTEGER] * 3, _REAL, _POINTER],
    "lineclear_bf16_gemm_is_faster": [],
    "lineclear_packed_size": [_INTEGER] * 2,
    "lineclear_pack": [*[_INTEGER] * 3, *[_POINTER] * 2],
    "lineclear_gemm": [*[_INTEGER] * 4, *[_POINTER] * 4],
    "lineclear_gemm_experts": [*[_INTEGER] * 4, *[_POINTER] * 5],
    "lineclear_grouped_channels": [],
    "lineclear_grouped_size": [_POINTER],
    "lineclear_quantize_groups": [*[_INTEGER] * 4, *[_POINTER] * 4],
    "lineclear_dequantize": [*[_INTEGER] * 4, *[_POINTER] * 5],
    "lineclear_pack_grouped": [_POINTER] * 4,
    "lineclear_grouped_gemm": [_POINTER, *[_INTEGER] * 3, *[_POINTER] * 2],
    "lineclear_grouped_gemm_experts": [*[_POINTER] * 2, *[_INTEGER] * 2, *[_POINTER] * 3],
    "lineclear_route": [_POINTER, *[_INTEGER] * 2, *[_POINTER] * 5],
    "lineclear_clamped_swiglu": [*[_INTEGER] * 3, *[_REAL] * 2, *[_POINTER] * 2],
    "lineclear_combine": [*[_INTEGER] * 4, *[_POINTER] * 3, _INTEGER, _POINTER],
    "lineclear_gather_rows": [*[_INTEGER] * 2, *[_POINTER] * 3],
    "lineclear_lora": [*[_INTEGER] * 6, *[_POINTER] * 5],
    "lineclear_replay": [_POINTER, _INTEGER, _POINTER],
}
"""Argument types of the exported functions."""
_RETURN_INTEGERS = ("queries_per_item", "bf16_gemm_is_faster", "packed_size", "grouped_channels", "grouped_size")
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
# Library name and the processor flags that it needs, best first.
_X86 = (
    ("x86_64_avx512bf16", {*_AVX512, "avx512_vnni", "avx512_bf16"}),
    ("x86_64_avx512vnni", {*_AVX512, "avx512_vnni"}),
    ("x86_64_avx512", _AVX512),
    ("x86_64_avx2", {"avx2", "fma", "f16c"}),
    ("x86_64_fma", {"fma"}),
)
# Prefixes of the flags that each value of ATEN_CPU_CAPABILITY hides.
_HIDDEN = {"avx2": ("avx512", "amx"), "default": ("avx512", "amx", "avx2")}


def candidates() -> list[str]:
    """Return the names of the libraries that are built and that this processor can run, best first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        flags = _x86_flags()
        names = [name for name, needed in _X86 if needed <= flags]
    else:
        names = [machine]
    return [name for name in names if _path(name).exists()]


def choose(name: str) -> None:
    """Select the library of this process: one of `candidates()`, the best of them (AUTO), or none (NONE).

    Call it before building anything that calls kernels. Raises ValueError, with the names to choose from.
    """
    global _chosen
    if name not in (AUTO, NONE) and (name not in candidates() or load(name) is None):
        raise ValueError(f"there are no kernels {name!r} here; there are {', '.join((AUTO, NONE, *candidates()))}")
    _chosen = name


def selected_library() -> Any | None:
    """Return the selected library, or None."""
    return _library(_chosen)


def prefers_bf16_gemm() -> bool:
    """Return whether `lineclear_gemm` is faster than oneDNN in bfloat16 here, or oneDNN has no such product."""
    if not onednn_packs(torch.bfloat16):
        return selected_library() is not None
    return _prefers_bf16_gemm(_chosen) and not _has_amx()


def prefers_float32_gemm() -> bool:
    """Return whether `lineclear_gemm` is faster than oneDNN in float32 here.

    With AVX2 oneDNN takes 1.3 to 1.6 times as long (AMD EPYC of Zen 3, 1 to 64 rows, 768 x 2048); with AVX-512 the two
    are level.
    """
    if not onednn_packs(torch.float32):
        return selected_library() is not None
    return library_name() == "x86_64_avx2" and _x86_flags().isdisjoint(("avx512f", "amx_bf16"))


def prefers_bf16_gemm_for_few_rows() -> bool:
    """Return whether `lineclear_gemm` is faster for few bfloat16 rows only; oneDNN uses AMX for many rows."""
    return onednn_packs(torch.bfloat16) and _prefers_bf16_gemm(_chosen) and _has_amx()


def onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can pack matrices of this type here. It needs AVX-512 or better for bfloat16."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def library_name() -> str:
    """Return the name of the selected library, such as `x86_64_avx512bf16`; empty for none."""
    found = selected_library()
    return "" if found is None else Path(found._name).stem.removeprefix("lineclear_")


def load(name: str) -> Any | None:
    """Load one library by name; None, with a warning, when it cannot be loaded or has another ABI number."""
    try:
        # torch is imported already, so the library binds to torch's OpenMP runtime: one thread pool for both.
        found = ctypes.CDLL(str(_path(name)))
        if (abi := int(found.lineclear_abi())) != _ABI:
            raise OSError(f"it has ABI {abi}, this version needs {_ABI}")
    except (OSError, AttributeError) as error:
        log.warning("kernels_not_loaded", library=name, reason=str(error), hint=_HINT)
        return None
    for function, arguments in FUNCTIONS.items():
        getattr(found, function).restype = None
        getattr(found, function).argtypes = arguments
    for function in _RETURN_INTEGERS:
        getattr(found, f"lineclear_{function}").restype = _INTEGER
    return found


_chosen = AUTO


@cache
def _library(chosen: str) -> Any | None:
    names = {AUTO: candidates(), NONE: []}.get(chosen, [chosen])
    return next((found for name in names if (found := load(name)) is not None), None)


@cache
def _prefers_bf16_gemm(chosen: str) -> bool:
    found = _library(chosen)
    return found is not None and bool(found.lineclear_bf16_gemm_is_faster())


def _has_amx() -> bool:
    return "amx_bf16" in _x86_flags()


def _path(name: str) -> Path:
    return _FOLDER / f"lineclear_{name}.so"


def _x86_flags() -> set[str]:
    """Return the processor's flags, without the instruction sets that ATEN_CPU_CAPABILITY hides from torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    found = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    hidden = _HIDDEN.get(os.environ.get("ATEN_CPU_CAPABILITY", "").lower(), ())
    return {flag for flag in found if not flag.startswith(hidden)}
