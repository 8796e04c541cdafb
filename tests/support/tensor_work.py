"""Count the work of tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and not func.is_view:
            self.num_elements += result.numel()
        return result


def count_elements(work: Callable[[], object]) -> int:
    """Return the number of elements that all operations of `work` write."""
    with torch.no_grad(), _Count() as count:
        work()
    return count.num_elements
