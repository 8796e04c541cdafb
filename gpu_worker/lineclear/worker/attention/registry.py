"""The attention backends by name.

To add a backend: a file beside this one and an entry in `BACKENDS`. The tests run over all entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import AttentionBackend, LayerSpec
from .cpu_native import NativeAttention, unsupported_reason
from .reference import ReferenceAttention
from .torch_paged import TorchPagedAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    "native": NativeAttention,
    "reference": ReferenceAttention,
    "torch_paged": TorchPagedAttention,
}


def choose(
    name: str,
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Resolve `name`, or "auto", to the name of a backend for these layers.

    Raises ValueError for an unknown name, and for "auto" if no backend supports int8 keys and values here.
    """
    if name == "auto":
        problem = unsupported_reason(layers, block_size, dtype, device)
        if problem and kv_dtype is torch.int8:
            raise ValueError(f"8-bit keys and values need the native attention backend: {problem}")
        return "torch_paged" if problem else "native"
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; choose from auto, {', '.join(sorted(BACKENDS))}")
    return name
