"""transformers, imported without the parts of PyTorch that a worker never uses: the compiler, and distributed tensors.

Of the CPU time that importing transformers takes, half goes into torch._dynamo, sympy and torch.distributed.tensor.
They are imported for one decorator (`torch.compiler.disable`, which keeps a method from being compiled) and for classes
that are defined only where `torch.distributed.is_available()`. A worker compiles nothing and is a single process, so
while transformers is imported the decorator does nothing and the answer to the question is no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["AttentionInterface", "AutoConfig", "AutoModelForCausalLM"]


def _unchanged(fn: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    return (lambda inner: inner) if fn is None else fn


_before = torch.compiler.disable, torch.distributed.is_available
torch.compiler.disable = _unchanged
torch.distributed.is_available = lambda: False
try:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
finally:
    torch.compiler.disable, torch.distributed.is_available = _before
