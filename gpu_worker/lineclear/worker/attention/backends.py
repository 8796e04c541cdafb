"""Which attention backends there are. To add one: a file beside this one and an entry here; the tests pick it up."""

from __future__ import annotations

import torch

from . import AttentionBackend
from .reference import ReferenceAttention
from .torch_paged import TorchPagedAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    "reference": ReferenceAttention,
    "torch_paged": TorchPagedAttention,
}


def choose(name: str, device: torch.device) -> str:
    """The backend that `name` means on `device`. Raises ValueError, with the names there are, for an unknown one."""
    if name == "auto":
        return "torch_paged"
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; there are auto, {', '.join(sorted(BACKENDS))}")
    return name
