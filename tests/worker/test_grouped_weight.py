"""The one form of quantized matrices: what an element is, and the error of quantizing."""

from __future__ import annotations

import pytest
import torch

from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.quantization.grouped_weight import GroupedWeight, quantize


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 254)])
def test_quantization_error_is_at_most_half_a_step(bits: int, levels: int) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(6, 64) * torch.tensor([1.0, 100.0, 1e-4, 0.0, 1.0, 1.0])[:, None]
    weight[4] += 3  # no value is near 0
    weight[5, 32:] *= 1000  # a group has its own scale
    quantized = quantize(weight, bits, 32)
    groups = weight.view(6, 2, 32)
    spread = 2 * groups.abs().amax(2) if bits == 8 else groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
    error = (quantized.dequantized() - weight).view(6, 2, 32).abs()
    assert (error <= (quantized.scale * 0.5001)[:, :, None]).all()
    assert error[0].max() > 0
    steps = spread / levels
    assert (quantized.scale >= steps * 0.9999).all()
    assert (quantized.scale <= steps * (1 + 2**-7)).all()  # the next number of bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_checkpoints_can_hold_what_quantize_makes(bits: int) -> None:
    """Scales of bfloat16, and zero points of 4 bits."""
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(1))
    weight[:10] += 2
    weight[10:20] -= 2
    quantized = quantize(weight, bits, 32)
    assert torch.equal(quantized.scale.bfloat16().float(), quantized.scale)
    if bits == 8:
        assert quantized.minimum is None
        assert quantized.codes.min() >= -127
        return
    assert quantized.minimum is not None
    zero = quantized.minimum / quantized.scale
    assert set(zero.flatten().tolist()) > {0.0, 15.0}
    assert set(zero.flatten().tolist()) <= set(map(float, range(16)))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 64), (4, 384), (8, 32), (8, 384)])
def test_kernels_quantize_as_torch_does(bits: int, group: int, dtype: torch.dtype) -> None:
    """Bit for bit: numbers of any size, ties, groups of one sign and of zeros, and what is not finite."""
    torch.manual_seed(bits + group)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (300, 384), dtype=torch.int32).view(torch.float32)
    usual = torch.randn(300, 384)
    usual[:50] += 5
    usual[50:100] -= 5
    usual[100:110], usual[110:120] = 0.0, -0.0
    usual[120:200] *= torch.logspace(-44, 38, 384)
    usual[200:220] *= torch.logspace(-44, 38, 20)[:, None]
    halves = torch.randint(-30, 31, (100, 384)) / 2
    weight = torch.cat((usual, halves, torch.where(any_bits.isfinite(), any_bits, 1.0))).to(dtype)
    weight[::50, 7] = float("nan")
    weight = weight.clamp(-torch.finfo(dtype).max / 4, torch.finfo(dtype).max / 4)
    found = quantize(weight, bits, group)
    kernels.choose(kernels.NONE)
    expected = quantize(weight, bits, group)
    finite = expected.scale.isfinite()
    assert not finite.all()
    assert torch.equal(found.scale.nan_to_num(-1), expected.scale.nan_to_num(-1))
    by_group = (matrix.values().view(len(weight), -1, group) for matrix in (found, expected))
    assert torch.equal(*(values[finite] for values in by_group))
    if expected.minimum is not None:
        assert found.minimum is not None
        assert torch.equal(found.minimum.nan_to_num(-1), expected.minimum.nan_to_num(-1))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["4 bits", "with minima", "of a table", "in another order", "8 bits"])
def test_kernels_dequantize_as_torch_does(form: str, dtype: torch.dtype) -> None:
    """Bit for bit, also of rows that are looked up and of scales that are not finite."""
    torch.manual_seed(1)
    bits = 8 if form == "8 bits" else 4
    codes = torch.randint(0, 256, (300, 96 * bits // 8), dtype=torch.uint8)
    scale, minimum = torch.randn(2, 300, 3) * torch.logspace(-42, 38, 300)[:, None]
    scale[7], scale[8] = float("nan"), float("inf")
    table = torch.randint(0, 32, (16,), dtype=torch.uint8) if form == "of a table" else None
    order = torch.randperm(96) if form == "in another order" else None
    signed = codes.view(torch.int8) if bits == 8 else codes
    weight = GroupedWeight(signed, bits, scale, None if form == "4 bits" else minimum, table, order)
    weights = (weight, weight.rows(torch.tensor([5, 0, 5])), weight.rows(slice(100, 300)))
    found = [matrix.dequantized(dtype) for matrix in weights]
    kernels.choose(kernels.NONE)
    for one, matrix in zip(found, weights, strict=True):
        expected = matrix.dequantized(dtype)
        assert torch.equal(one.isfinite(), expected.isfinite())
        assert torch.equal(one.nan_to_num(1.0), expected.nan_to_num(1.0))


def test_elements_are_those_of_the_definition() -> None:
    codes = torch.tensor([[0x10, 0xF2]], dtype=torch.uint8)  # 0, 1, 2, 15
    scale, minimum = torch.tensor([[2.0, 0.5]]), torch.tensor([[1.0, 0.25]])
    assert GroupedWeight(codes, 4, scale, minimum).dequantized().tolist() == [[-1.0, 1.0, 0.75, 7.25]]
    table = torch.arange(31, 15, -1, dtype=torch.uint8)
    assert GroupedWeight(codes, 4, scale, minimum, table).dequantized().tolist() == [[61.0, 59.0, 14.25, 7.75]]
    order = torch.tensor([2, 0, 3, 1])  # column 0 multiplies input 2
    ordered = GroupedWeight(codes, 4, scale, minimum, None, order)
    assert ordered.dequantized().tolist() == [[1.0, 7.25, -1.0, 0.75]]
    values = torch.tensor([[-128, 0, 127, 1]], dtype=torch.int8)
    assert GroupedWeight(values, 8, scale).dequantized(torch.bfloat16).tolist() == [[-256.0, 0.0, 63.5, 0.5]]


def test_groups_must_fit() -> None:
    with pytest.raises(ValueError, match="48 inputs cannot be divided into groups of 32"):
        quantize(torch.ones(2, 48), 4, 32)


def test_reports_shape_group_and_memory() -> None:
    weight = quantize(torch.ones(3, 64), 4, 16)
    assert (weight.shape, weight.group_size, weight.num_bytes) == ((3, 64), 16, 3 * 32 + 2 * 3 * 4 * 4)
