"""Which attention backends there are. To add one: a file beside this one and an entry here; the tests pick it up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import AttentionBackend, LayerSpec
from .cpu_native import NativeAttention, unsupported
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
    """The backend that `name` means for such a model.

    Raises ValueError for an unknown one, naming those there are, and where 8-bit keys and values cannot be kept.
    """
    if name == "auto":
        problem = unsupported(layers, block_size, dtype, device)
        if problem and kv_dtype is torch.int8:
            raise ValueError(f"8-bit keys and values need the native attention backend: {problem}")
        return "torch_paged" if problem else "native"
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; there are auto, {', '.join(sorted(BACKENDS))}")
    return name
