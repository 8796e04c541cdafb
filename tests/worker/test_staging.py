"""The staging buffer: arrays arrive in one copy, at the same places in equal steps, and no step disturbs another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lineclear.worker.device.staging import Staging

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(5, dtype=np.int64),
    np.array([[1.5, -2.0], [0.0, 4.25]], np.float32),
    np.array([True, False, True]),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    np.array([0.125], np.float64),
    np.zeros((0, 4), np.int32),
)


def test_arrays_of_a_step_arrive_in_one_copy() -> None:
    staging = Staging(CPU, 1024, is_direct=False)
    staging.begin()
    found = [staging.put(array) for array in ARRAYS]
    assert staging.num_copies == 0
    staging.send()
    assert staging.num_copies == 1
    assert [x.tolist() for x in found] == [x.tolist() for x in ARRAYS]
    assert [x.dtype for x in found] == [torch.from_numpy(x.copy()).dtype for x in ARRAYS]


def test_equal_steps_use_equal_addresses() -> None:
    staging = Staging(CPU, 1024, is_direct=False)
    addresses = []
    for _ in range(6):
        staging.begin()
        addresses.append([staging.put(array).data_ptr() for array in ARRAYS[:5]])
        staging.send()
    assert len(set(map(tuple, addresses))) == 1
    assert all(address % 16 == 0 for address in addresses[0])


def test_array_that_does_not_fit_has_a_copy_of_its_own() -> None:
    staging = Staging(CPU, 64, is_direct=False)
    staging.begin()
    small, large = staging.put(np.arange(4)), staging.put(np.arange(100))
    staging.send()
    assert (small.tolist(), large.tolist()) == (list(range(4)), list(range(100)))


@pytest.mark.parametrize("is_direct", [True, False])
def test_outside_of_a_step_an_array_arrives_at_once(is_direct: bool) -> None:
    staging = Staging(CPU, 64, is_direct=is_direct)
    assert staging.put(np.arange(3)).tolist() == [0, 1, 2]
    staging.begin()
    staging.send()
    assert staging.put(np.arange(3)).tolist() == [0, 1, 2]


def test_what_was_put_for_a_failed_step_is_not_sent() -> None:
    staging = Staging(CPU, 64, is_direct=False)
    staging.begin()
    staging.put(np.array([7]))
    staging.begin()
    found = staging.put(np.array([8]))
    staging.send()
    assert (found.tolist(), staging.num_copies) == ([8], 1)
