"""Captures the kernel calls of a step once and replays them at every step, after the model of CUDA graphs.

For a few rows, looking up tensors, pointers and shapes in Python costs more than many kernels take. So the arguments
are built once, over buffers that stay. Values that change between steps, such as the number of rows, are a `DynamicInt`
or a `DynamicPointer` that the calls share and read when they run. Consecutive kernels are replayed by one native call.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any

import numpy.typing as npt
from torch import Tensor

from .native_library import FUNCTIONS

DynamicInt = ctypes.c_int64
"""An integer argument whose `value` may change between two replays."""
DynamicPointer = ctypes.c_void_p
"""A pointer argument whose `value` may change between two replays."""


class Kernel:
    """A function of a kernel library. Its arguments are ctypes objects of exactly the types in `FUNCTIONS`."""

    def __init__(self, library: Any, name: str) -> None:
        self.name = name
        self.types = FUNCTIONS[name]
        # library[name] returns a new function object without argtypes, so ctypes does not check each argument per call.
        self._function, self.replayer = library[name], library["lineclear_replay"]
        self._function.restype = self.replayer.restype = None
        self.captured: Any = library[f"{name}_captured"]

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)


Call = tuple[Kernel | Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments. Python calls functions that are not a `Kernel`."""


class CallGraph:
    """A captured sequence of calls."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._segments: list[_NativeCalls | _PythonCalls] = []
        for function_type, group in groupby(calls, lambda call: type(call[0])):
            self._segments.append((_NativeCalls if function_type is Kernel else _PythonCalls)(list(group)))

    def replay(self) -> None:
        for segment in self._segments:
            segment.replay()

    def replay_timed(self) -> Iterable[tuple[str, int]]:
        """Make the calls in order and return the name and the nanoseconds of each."""
        return chain.from_iterable([segment.replay_timed() for segment in self._segments])


TimedReplay = tuple[int, Iterable[tuple[str, int]]]
"""Start of a replay by the monotonic clock, and name and nanoseconds of each call."""


@contextmanager
def timed_replays() -> Iterator[list[TimedReplay]]:
    """Time the calls of all graphs meanwhile. The list grows by each replay."""
    timings: list[TimedReplay] = []
    plain = CallGraph.replay

    def timed(self: CallGraph) -> None:
        timings.append((time.monotonic_ns(), self.replay_timed()))

    CallGraph.replay = timed  # type: ignore[method-assign]
    try:
        yield timings
    finally:
        CallGraph.replay = plain  # type: ignore[method-assign]


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure that have one C type."""
    return [(name, kind) for name in names]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return a pointer to the tensor's first element; null for None. The caller keeps the tensor alive."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array, which the caller keeps alive; TypeError if it is not contiguous and writable."""
    return ctypes.addressof(_NO_BYTES.from_buffer(array.data))


def pointer_to(structure: ctypes.Structure | ctypes.Array[Any]) -> ctypes.c_void_p:
    """Return a pointer to the structure, or the first one of an array. The caller keeps it alive."""
    return ctypes.c_void_p(ctypes.addressof(structure))


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.c_void_p:
    """Return a pointer to an array of pointers, as `pointer` makes them. It keeps the array alive, not the tensors."""
    return ctypes.cast((ctypes.c_void_p * len(tensors))(*(pointer(x).value for x in tensors)), ctypes.c_void_p)


_NO_BYTES = ctypes.c_char * 0


class _PythonCalls:
    """Consecutive calls made by Python."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for function, arguments in self._calls:
            function(*arguments)

    def replay_timed(self) -> Iterable[tuple[str, int]]:
        timings = list[tuple[str, int]]()
        for function, arguments in self._calls:
            started_at = time.perf_counter_ns()
            function(*arguments)
            nanoseconds = time.perf_counter_ns() - started_at
            timings.append((getattr(function, "__name__", type(function).__name__), nanoseconds))
        return timings


class _CapturedCall(ctypes.Structure):
    """`LineclearCall` in kernels/graph_replay.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class _NativeCalls:
    """Consecutive kernel calls, made by one call of `lineclear_replay`."""

    def __init__(self, calls: Sequence[Any]) -> None:
        for kernel, arguments in calls:
            # The library reads each argument as the type in its signature; another type would be other bytes.
            assert [type(x) for x in arguments] == kernel.types, f"arguments of {kernel.name}: {arguments}"
        self._names = [kernel.name for kernel, _ in calls]
        self._arguments = [arguments for _, arguments in calls]  # kept alive: the library reads their addresses
        self._addresses = [(ctypes.c_void_p * len(x))(*map(ctypes.addressof, x)) for x in self._arguments]
        kernels = (ctypes.cast(kernel.captured, ctypes.c_void_p) for kernel, _ in calls)
        captured = (_CapturedCall(x.value, ctypes.addressof(y)) for x, y in zip(kernels, self._addresses, strict=True))
        self._calls = (_CapturedCall * len(calls))(*captured)
        self._replay = calls[0][0].replayer
        self._first, self._count = ctypes.c_void_p(ctypes.addressof(self._calls)), DynamicInt(len(calls))
        self._no_timings = ctypes.c_void_p(None)

    def replay(self) -> None:
        self._replay(self._first, self._count, self._no_timings)

    def replay_timed(self) -> Iterable[tuple[str, int]]:
        nanoseconds = (ctypes.c_int64 * len(self._names))()
        self._replay(self._first, self._count, ctypes.c_void_p(ctypes.addressof(nanoseconds)))
        return zip(self._names, nanoseconds, strict=True)
