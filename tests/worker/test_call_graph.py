"""Recorded calls: made in order, with the numbers and places of the moment, kernels and Python side by side."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
import torch
from support.kernel_variants import needs_kernels
from torch import Tensor

from lineclear.worker.kernels.call_graph import Call, CallGraph, DynamicInt, DynamicPointer, Kernel, address, pointer
from lineclear.worker.kernels.native_library import selected_library

pytestmark = needs_kernels


def take_rows(rows: DynamicInt, table: Tensor, indices: DynamicPointer, out: Tensor) -> Call:
    """out[i] = table[indices[i]] for the first `rows` of them."""
    size = ctypes.c_int64(table.shape[1] * table.itemsize)
    return Kernel(selected_library(), "lineclear_gather_rows"), (rows, size, pointer(table), indices, pointer(out))


def test_replay_reads_current_dynamic_values() -> None:
    table, out = torch.arange(12.0).view(4, 3), torch.zeros(2, 3)
    rows, indices = DynamicInt(0), DynamicPointer()
    graph = CallGraph([take_rows(rows, table, indices, out)])
    gc.collect()  # the graph alone keeps the arguments alive
    graph.replay()
    assert not out.any(), "no rows yet"
    first, second = torch.tensor([3, 1]), torch.tensor([2, 2])
    rows.value, indices.value = 2, first.data_ptr()
    graph.replay()
    assert out.tolist() == [[9, 10, 11], [3, 4, 5]]
    rows.value, indices.value = 1, second.data_ptr()
    graph.replay()
    assert out.tolist() == [[6, 7, 8], [3, 4, 5]]
    CallGraph().replay()


def test_python_and_native_calls_keep_their_order() -> None:
    a, b = torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)
    swapped = torch.tensor([1, 0])
    indices = DynamicPointer(swapped.data_ptr())
    there, back = take_rows(DynamicInt(2), a, indices, b), take_rows(DynamicInt(2), b, indices, a)
    graph = CallGraph([there, (lambda: b.mul_(10), ()), (lambda: b.add_(1), ()), back, there])
    graph.replay()
    assert a.tolist() == [[11], [21]]
    assert b.tolist() == [[21], [11]]


def test_timed_replay_names_each_call() -> None:
    def double() -> None:
        table.mul_(2)

    table, out = torch.ones(1, 3), torch.zeros(1, 3)
    zero = torch.tensor([0])
    take = take_rows(DynamicInt(1), table, DynamicPointer(zero.data_ptr()), out)
    timed = CallGraph([take, (double, ()), take, (double, ()), take]).replay_timed()
    assert out.tolist() == [[4, 4, 4]], "the calls are made before anybody looks at their times"
    spent = list(timed)
    assert [name for name, _ in spent] == ["lineclear_gather_rows", "double"] * 2 + ["lineclear_gather_rows"]
    assert all(nanoseconds > 0 for _, nanoseconds in spent)


def test_wrong_argument_types_are_refused() -> None:
    kernel, (rows, size, table, indices, out) = take_rows(
        DynamicInt(1), torch.ones(1, 1), DynamicPointer(), torch.ones(1, 1)
    )
    for wrong in ((rows, ctypes.c_int32(4), table, indices, out), (rows, size, table, indices)):
        with pytest.raises(AssertionError, match="lineclear_gather_rows"):
            CallGraph([(kernel, wrong)])


def test_address_refuses_unsuitable_arrays() -> None:
    table = np.arange(6).reshape(2, 3)
    assert address(table) == table.ctypes.data
    assert address(table[1]) == table.ctypes.data + 3 * table.itemsize
    assert address(table[:0])
    for wrong in (table[:, 0], table.T):
        with pytest.raises(TypeError, match="contiguous"):
            address(wrong)
