"""Packed linear layers with the kernel, in every library that this processor can run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lineclear.worker.cpu import linear
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels import native_library
from lineclear.worker.kernels.call_graph import DynamicInt
from lineclear.worker.kernels.native_library import onednn_packs

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def layer(outputs: int, inputs: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def product(multiply: linear.Linear, x: torch.Tensor, outputs: int) -> torch.Tensor:
    return multiply(x.contiguous(), x.new_empty(len(x), outputs))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (200, 48), (77, 512), (1, 32)])
@BOTH
def test_products_are_exact_up_to_rounding(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    module = layer(outputs, inputs, bias=bias, dtype=dtype)
    multiply = linear.KernelLinear(module.weight.detach(), module.bias.detach() if bias else None, HugePageArena())
    exact = module.double()
    for rows in (*range(17), 27, 28, 64, 130):
        x = torch.randn(rows, inputs).to(dtype)
        rtol = 2**-8 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(product(multiply, x, outputs).double(), exact(x.double()), rtol=rtol, atol=1e-5)


@pytest.mark.usefixtures("each_library")
@BOTH
def test_rows_are_independent(dtype: torch.dtype) -> None:
    module = layer(96, 80, bias=True, dtype=dtype)
    multiply = linear.pack_by_row([module], HugePageArena())
    x = torch.randn(150, 80).to(dtype)
    alone = torch.cat([product(multiply, row[None], 96) for row in x])
    for rows in (2, 5, 13, 14, 27, 64, 150):
        assert torch.equal(product(multiply, x[:rows], 96), alone[:rows])


@pytest.mark.usefixtures("each_library")
def test_non_finite_inputs_stay_in_their_row() -> None:
    multiply = linear.KernelLinear(layer(32, 32).weight.detach(), None, HugePageArena())
    x = torch.randn(3, 32).bfloat16()
    clean = product(multiply, x, 32)
    x[1, 7] = float("nan")
    found = product(multiply, x, 32)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.usefixtures("each_way")
def test_fused_layers_keep_their_order() -> None:
    modules = [layer(32, 48, bias=True), layer(16, 48)]
    x = torch.randn(4, 48).bfloat16()
    found = product(linear.pack(modules, HugePageArena()), x, 48)
    torch.testing.assert_close(found, torch.cat([module(x) for module in modules], dim=1), rtol=2**-7, atol=1e-3)


def test_arena_memory_is_aligned_and_disjoint() -> None:
    arena = HugePageArena()
    tensors = [arena.allocate((n, 3), torch.bfloat16) for n in (1, 50, 40_000_000, 7)]
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor[-1] = value
        tensor[0] = value
    assert [int(t[0, 0]) for t in tensors] == [0, 1, 2, 3]
    assert [int(t[-1, 2]) for t in tensors] == [0, 1, 2, 3]


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_use_the_kernel_and_many_onednn(bias: bool) -> None:
    modules = [layer(32, 48, bias=bias), layer(16, 48, bias=bias)]
    weight, biases = linear.fused_weights(modules)
    both = linear.pack_twice(modules, HugePageArena())
    ours = linear.KernelLinear(weight, biases, HugePageArena())
    theirs = linear.onednn(weight, biases) if onednn_packs(torch.bfloat16) else ours
    rows, x, out = DynamicInt(0), torch.randn(40, 48).bfloat16(), torch.zeros(40, 48, dtype=torch.bfloat16)
    multiply, arguments = both.bind(rows, x, out)
    for rows.value in (1, 16, 17, 40, 2):  # the same recorded call for all of them
        expected = product(ours if rows.value <= 16 else theirs, x[: rows.value], 48)
        assert torch.equal(product(both, x[: rows.value], 48), expected)
        multiply(*arguments)
        assert torch.equal(out[: rows.value], expected)


@pytest.mark.parametrize("pack", [linear.pack, linear.pack_twice])
@pytest.mark.parametrize("inputs", [48, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.usefixtures("best_and_none")
def test_any_weights_are_packed(
    pack: linear.Packer, inputs: int, dtype: torch.dtype, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels lack widths and float16; oneDNN lacks bfloat16 without AVX-512, and float16 on most processors."""
    if not by_onednn:
        monkeypatch.setattr(linear, "onednn", lambda *_: pytest.fail("oneDNN cannot pack here"))
        for module in (linear, native_library):
            monkeypatch.setattr(module, "onednn_packs", lambda _: False)
    modules = [layer(32, inputs, bias=True).to(dtype)]
    x = torch.randn(3, inputs).to(dtype)
    found = product(pack(modules, HugePageArena()), x, 32)
    torch.testing.assert_close(found, modules[0](x), rtol=2**-7, atol=1e-3)
