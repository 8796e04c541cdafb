"""Compiles the Triton kernels for CUDA architectures, without a device, and prints what they need: a JSON line each.

python -m support.compile_kernels 80 90 100
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lineclear.worker.attention import triton_paged as paged
from lineclear.worker.cuda import layer_kernels
from lineclear.worker.sampling import triton_threshold

POINTERS = {"tiles": "*i32", "blocks": "*i32", "cells": "*i64", "targets": "*fp64", "found": "*i32"} | dict.fromkeys(
    ("partial", "maxima", "sums"), "*fp32"
)
POINTERS |= {"rows": "*i64", "positions": "*i64"}
OF_LAYERS = ("residual", "add", "sums", "normed", "qkv", "rotary", "source", "out")
OF_NORMS = ("weight", "add_weight", "bias", "weights")
ELEMENTS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
ALIGNED = {
    "query",
    "keys",
    "values",
    "out",
    "key",
    "value",
    "partial",
    "query_token",
    "query_head",
    *OF_LAYERS,
    *OF_NORMS,
}
PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MODELS = (
    # group, head size, window, softcap, sinks
    (4, 128, 0, False, False),  # Llama 3, Qwen3
    (8, 64, 128, False, True),  # gpt-oss
    (2, 256, 4096, True, False),  # Gemma 2
)


def variants(dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Return kernels, their constants and their warps: those that serving the models uses."""
    models = MODELS if dtype is torch.bfloat16 else MODELS[:1]
    for group, dim, window, has_softcap, has_sinks in models:
        shape = paged.Shape.of(group, dim, dtype)
        model = {"GROUP": group, "DIM": dim, "DIM_PAD": shape.dim_pad, "TILE_KEYS": shape.keys, "BLOCK_SIZE": 16}
        model |= {"WINDOW": window, "CHUNK": 0, "HAS_SOFTCAP": has_softcap, "HAS_SINKS": has_sinks}
        for rows, split in ((shape.decode_rows, 0), (shape.decode_rows, paged.SPLIT_KEYS), (shape.rows, 0)):
            yield paged.attend_kernel, model | {"ROWS": rows, "SPLIT": split}, shape.num_warps(rows)
    yield paged.combine_kernel, {"DIM": 128, "DIM_PAD": 128, "SPLIT": paged.SPLIT_KEYS}, 4
    for has_weights in (False, True):
        bisection = {"HAS_WEIGHTS": has_weights, "TILE": triton_threshold.TILE}
        yield triton_threshold.largest_reaching_kernel, bisection, triton_threshold.NUM_WARPS
    yield from layers(dtype)
    yield paged.write_kernel, {"HEADS": 8, "DIM": 128, "HEADS_PAD": 8, "DIM_PAD": 128}, 4


def layers(dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Return the kernels between matrix products: of Llama 3 8 B, OLMo 2 7 B, Qwen3 and Llama 3 405 B."""
    wide = {"WIDTH": 4096, "WIDTH_PAD": 4096, "HAS_ADD": True, "HAS_ROWS": False, "NORMS_ADD": False, "NORMS_SUM": True}
    wide["CENTERS"] = False
    largest = {"WIDTH": 16384, "WIDTH_PAD": 16384, "HAS_ROWS": True, "NORMS_ADD": True, "CENTERS": True}
    for changes in ({}, largest) if dtype is torch.bfloat16 else ({},):
        constants = wide | changes
        yield layer_kernels.add_norm_kernel, constants, layer_kernels.num_warps(constants["WIDTH_PAD"])
    heads = {"QUERY_HEADS": 32, "KEY_HEADS": 8, "DIM": 128, "DIM_PAD": 128, "ROTATED": 128, "HEADS_PAD": 8}
    heads |= {"HAS_NORM": False, "WHOLE_ROWS": False, "PAIRS": False}
    whole = {"KEY_HEADS": 32, "HEADS_PAD": 32, "HAS_NORM": True, "WHOLE_ROWS": True}
    for changes in ({}, {"HAS_NORM": True, "PAIRS": True}, whole) if dtype is torch.bfloat16 else ({},):
        constants = heads | changes
        yield layer_kernels.rotate_kernel, constants, layer_kernels.num_warps(constants["HEADS_PAD"] * 128)
    for activation in range(5) if dtype is torch.bfloat16 else (0,):
        mlp = {"WIDTH": 14336, "TILE": layer_kernels.TILE, "ACTIVATION": activation, "IS_GATED": activation < 2}
        yield layer_kernels.activate_kernel, mlp, 4


def compiled(kernel: Any, constants: dict[str, Any], num_warps: int, dtype: torch.dtype, architecture: int) -> Any:
    types = POINTERS | {"scaling": "fp32", "softcap": "fp32"}
    for name in ("query", "key", "value", "keys", "values", "out", "sinks"):
        types[name] = ELEMENTS[dtype]
    if kernel.__module__ == layer_kernels.__name__:
        types |= (
            dict.fromkeys(OF_NORMS, "*fp32")
            | dict.fromkeys(OF_LAYERS, ELEMENTS[dtype])
            | dict.fromkeys(("eps", "add_eps", "scale"), "fp32")
        )
    if kernel is triton_threshold.largest_reaching_kernel:
        types |= {"keys": "*i32", "weights": "*fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ALIGNED}
    source = ASTSource(kernel, signature, {(names.index(name),): x for name, x in constants.items()}, attributes)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps})


def resources(kernel: Any) -> dict[str, int]:
    """Return registers of a thread, bytes of its stack (spills), and bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(PROGRAMS / "cuobjdump"), "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", output.stdout + output.stderr)
    assert found, output
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": int(kernel.metadata.shared)}


def main(architectures: list[str]) -> None:
    for architecture in map(int, architectures):
        for dtype in (torch.bfloat16, torch.float32):  # float16 needs what bfloat16 needs
            for kernel, constants, num_warps in variants(dtype):
                used = resources(compiled(kernel, constants, num_warps, dtype, architecture))
                entry = {"kernel": kernel.__name__, "architecture": architecture, "dtype": str(dtype)}
                print(json.dumps(entry | constants | used), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
