"""Calls that are the same at every step but for the number of rows: recorded once, played again and again.

Looking up tensors, their pointers and shapes costs more than many a kernel takes for a single row, and so does going
from Python into a kernel and back. So the arguments are made once, over memory that stays; how many rows of it a step
uses is a `Count`, which the calls share and read as they are made; and kernels that follow one another are one native
call.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from . import FUNCTIONS

DynamicInt = ctypes.c_int64
"""A number that may change between two plays."""
DynamicPointer = ctypes.c_void_p
"""A pointer; where it points may change between two plays."""


class Kernel:
    """A function of a library, by name. It takes ctypes objects of exactly the types of its signature."""

    def __init__(self, library: Any, name: str) -> None:
        self.name = name
        self.types = FUNCTIONS[name]
        # Looked up anew, these take ctypes objects as they are, without looking at each of them at every call.
        self._function, self.replayer = library[name], library["lineclear_play"]
        self._function.restype = self.replayer.restype = None
        self.captured: Any = library[f"{name}_recorded"]

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)


Call = tuple[Kernel | Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments. What is not a Kernel is called by Python."""


class CallGraph:
    """Calls in the order in which they are made."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._pieces: list[_Segment] = []
        for function_type, group in groupby(calls, lambda call: type(call[0])):
            piece: type[_Segment] = _NativeCalls if function_type is Kernel else _PythonCalls
            self._pieces.append(piece(list(group)))

    def replay(self) -> None:
        """Make the calls."""
        for piece in self._pieces:
            piece.replay()

    def timed(self) -> Iterable[tuple[str, int]]:
        """Make the calls. The name and nanoseconds of each, to be looked at when nobody waits any more."""
        return chain.from_iterable([piece.timed() for piece in self._pieces])


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """To the tensor's first element; null for None. The tensor must be kept alive and where it is."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def address(array: npt.NDArray[Any]) -> int:
    """Of the array's first element. It must be kept alive, contiguous and writable; the last two are looked at."""
    return ctypes.addressof(_ANYTHING.from_buffer(array.data))


def pointer_to(structure: ctypes.Structure) -> ctypes.c_void_p:
    """To the structure, which must be kept alive."""
    return ctypes.c_void_p(ctypes.addressof(structure))


_ANYTHING = ctypes.c_char * 0


class _Segment(Protocol):
    """Calls of one kind."""

    def __init__(self, calls: Sequence[Call]) -> None: ...

    def replay(self) -> None: ...

    def timed(self) -> Iterable[tuple[str, int]]: ...


class _PythonCalls:
    """Calls that Python makes."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)

    def timed(self) -> Iterable[tuple[str, int]]:
        found = list[tuple[str, int]]()
        for function, arguments in self._calls:
            begin = time.perf_counter_ns()
            function(*arguments)
            nanoseconds = time.perf_counter_ns() - begin
            found.append((getattr(function, "__name__", type(function).__name__), nanoseconds))
        return found


class _Call(ctypes.Structure):
    """As `LineclearCall` in kernels/play.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("places", ctypes.c_void_p))


class _NativeCalls:
    """Calls of kernels, which the library makes."""

    def __init__(self, calls: Sequence[tuple[Kernel, tuple[Any, ...]]]) -> None:
        for kernel, arguments in calls:
            # The library reads each argument as what the signature says; another type would be other bytes.
            assert [type(x) for x in arguments] == kernel.types, f"arguments of {kernel.name}: {arguments}"
        self._names = [kernel.name for kernel, _ in calls]
        self._arguments = [arguments for _, arguments in calls]  # they are where the library reads them
        self._places = [(ctypes.c_void_p * len(x))(*map(ctypes.addressof, x)) for x in self._arguments]
        kernels = (ctypes.cast(kernel.captured, ctypes.c_void_p) for kernel, _ in calls)
        made = (_Call(x.value, ctypes.addressof(y)) for x, y in zip(kernels, self._places, strict=True))
        self._calls = (_Call * len(calls))(*made)
        self._player = calls[0][0].replayer
        self._at, self._count = ctypes.c_void_p(ctypes.addressof(self._calls)), DynamicInt(len(calls))
        self._unwatched = ctypes.c_void_p(None)

    def replay(self) -> None:
        self._player(self._at, self._count, self._unwatched)

    def timed(self) -> Iterable[tuple[str, int]]:
        nanoseconds = (ctypes.c_int64 * len(self._names))()
        self._player(self._at, self._count, ctypes.c_void_p(ctypes.addressof(nanoseconds)))
        return zip(self._names, nanoseconds, strict=True)
