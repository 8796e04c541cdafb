"""Generates the client for threads, and builds the C++ kernels into the worker's package.

Runs with every wheel and editable install. There is one library for each instruction set of this machine's kind, or
of that in _PYTHON_HOST_PLATFORM (`linux-aarch64`, with CXX=aarch64-linux-gnu-g++). Without a compiler, or with
LINECLEAR_NATIVE=0, none is built and the worker computes with torch: a client or a scheduler must install anywhere.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("gpu_worker/lineclear/worker/kernels")
COMMON = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512"
VARIANTS = {
    "x86_64": {
        "x86_64_avx512bf16": f"{AVX512} -mavx512vnni -mavx512bf16",
        "x86_64_avx512vnni": f"{AVX512} -mavx512vnni",
        "x86_64_avx512": AVX512,
        "x86_64_avx2": "-mavx2 -mfma -mf16c",
        # The source as ARM has it. Without fused multiply-add it would round otherwise than the others.
        "x86_64_fma": "-mfma",
    },
    "aarch64": {"aarch64": ""},
}


class GeneratedFiles(BuildHookInterface):  # type: ignore[type-arg]
    """The hook hatchling calls before it packs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what can be built; a wheel with libraries in it is for this platform only."""
        if self.target_name != "wheel":
            return
        runpy.run_path(str(Path(self.root) / "client/generate_sources.py"))["main"]()
        generated = ("_sync/*.py", "call_params.py", "message_classes.py")
        build_data["artifacts"] += [f"/client/lineclear/client/{name}" for name in generated]
        if libraries := build(Path(self.root)):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [f"/{KERNELS}/{library.name}" for library in libraries]


def build(root: Path) -> list[Path]:
    """Compile the variants that are missing or older than their source. Returns the libraries there are now."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    variants = VARIANTS.get(sysconfig.get_platform().rpartition("-")[2], {})
    if os.environ.get("LINECLEAR_NATIVE") == "0" or not variants:
        return []
    folder = root / KERNELS
    outputs = {folder / f"lineclear_{name}.so": flags.split() for name, flags in variants.items()}
    stale = {out: flags for out, flags in outputs.items() if not _is_fresh(out)}
    if stale and compiler is None:
        print("no C++ compiler: the worker will use its torch attention backend", file=sys.stderr)
    elif compiler is not None:
        jobs = {out: _compile(compiler, out, flags) for out, flags in stale.items()}
        for out, job in jobs.items():
            errors = job.communicate()[1]
            if job.returncode:
                print(f"{out.name} was not built:\n{errors.decode(errors='replace')[-2000:]}", file=sys.stderr)
            else:
                out.with_suffix(".part").replace(out)
    return [out for out in outputs if out.exists()]


def _is_fresh(out: Path) -> bool:
    newest = max(source.stat().st_mtime for pattern in ("*.cpp", "*.h") for source in out.parent.glob(pattern))
    return out.exists() and out.stat().st_mtime >= newest


def _compile(compiler: str, out: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    sources = sorted(map(str, out.parent.glob("*.cpp")))
    command = [compiler, *COMMON, *flags, *sources, "-o", str(out.with_suffix(".part"))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
