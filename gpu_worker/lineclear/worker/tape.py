"""Calls that are the same at every step but for the number of rows: recorded once, run again and again.

Looking up tensors, their pointers and shapes costs more than many a kernel takes for a single row. So the arguments are
made once, over memory that stays; how many rows of it a step uses is a `Count`, which the calls share and read as they
are made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

Count = ctypes.c_int64
"""A number that may change between two calls."""
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


def bare(library: Any, name: str) -> Callable[..., Any]:
    """A function of a library that takes ctypes objects as they are, without looking at each of them at every call."""
    function: Any = library[name]
    function.restype = None
    return function  # type: ignore[no-any-return]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """To the tensor's first element; null for None. The tensor must be kept alive and where it is."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def play(tape: Iterable[Call]) -> None:
    """Make the calls, in order."""
    for function, arguments in tape:
        function(*arguments)
