"""The attention backends by name.

To add a backend: a file beside this one and an entry in `BACKENDS`. The tests run over all entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lineclear.worker.kernels import triton_support

from .base import AttentionBackend, LayerSpec
from .cpu_native import NativeAttention, unsupported_reason
from .reference import ReferenceAttention
from .torch_paged import TorchPagedAttention

MAX_HEAD_DIM = 256
"""Of `triton_paged` by automatic choice: a tile of larger heads does not fit into the shared memory of every GPU."""


def _triton_paged(*args: Any) -> AttentionBackend:
    """Import the kernels, which takes a second that other backends need not pay."""
    try:
        from .triton_paged import TritonPagedAttention
    except ImportError:
        raise ValueError(
            "the triton_paged attention backend needs the package triton, which torch for CUDA brings"
        ) from None
    return TritonPagedAttention(*args)


def _flash(*args: Any) -> AttentionBackend:
    from .flash import FlashAttention  # other workers do not pay for its import

    return FlashAttention(*args)


BACKENDS: dict[str, Callable[..., AttentionBackend]] = {
    "flash": _flash,
    "native": NativeAttention,
    "reference": ReferenceAttention,
    "torch_paged": TorchPagedAttention,
    "triton_paged": _triton_paged,
}

ON_CUDA = ("flash", "triton_paged")
"""Backends of CUDA devices."""


def choose(
    name: str,
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Resolve `name`, or "auto", to the name of a backend for these layers. Raises ValueError without one."""
    if not layers:
        if kv_dtype is torch.int8:
            raise ValueError("a model without attention has no keys and values: leave --kv-cache-dtype at auto")
        return "torch_paged"  # of a model without attention: it has no pools, and no kernels
    if name == "auto":
        has_kernels = kv_dtype in (None, dtype) and all(x.head_dim <= MAX_HEAD_DIM for x in layers)
        if device.type == "cuda" and has_kernels and triton_support.is_usable():
            return "triton_paged"
        problem = unsupported_reason(layers, block_size, dtype, device)
        if problem and kv_dtype is torch.int8:
            raise ValueError(f"8-bit keys and values need the native attention backend: {problem}")
        return "torch_paged" if problem else "native"
    if name in ON_CUDA and device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise ValueError(f"the {name} attention backend runs on CUDA devices only")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; choose from auto, {', '.join(sorted(BACKENDS))}")
    return name
