"""Products with 8-bit weights: exact integers, so every instruction set, batch and position gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import LIBRARIES, needs_kernels
from torch import Tensor, nn
from worker.settings_runner import runner_with

from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.cpu.int8_linear import pack_int8, quantize
from lineclear.worker.huge_pages import HugePageArena
from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.model import loader
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import to_int8, wrap_model

pytestmark = needs_kernels
DTYPES = [torch.float32, torch.bfloat16]


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    layer = nn.Linear(inputs, outputs, bias=bias)
    # Channels of very different size: a scale for all of them would lose the small ones.
    layer.weight.data *= torch.logspace(-3, 1, outputs)[torch.randperm(outputs), None]
    return layer.to(dtype).requires_grad_(False)


def packed(layers: list[nn.Linear]) -> Callable[[Tensor], Tensor]:
    product, outputs = pack_int8(layers, HugePageArena()), sum(layer.out_features for layer in layers)
    return lambda x: product(x.contiguous(), x.new_empty(len(x), outputs))


def as_promised(x: Tensor, layers: list[nn.Linear]) -> Tensor:
    """The same product in float64, of the same 8-bit numbers."""
    values, scale = quantize(torch.cat([layer.weight for layer in layers]))
    largest = x.float().abs().amax(dim=1, keepdim=True)
    row_scale = largest / 127
    # torch computes 127 / x as a reciprocal times 127; the kernel divides, and multiplies without rounding in between.
    rows = (x.double() * torch.tensor(127.0).div(largest).double()).round()
    product = rows @ values.double().T * scale * row_scale
    biases = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias.float() for layer in layers]
    return product + torch.cat(biases)


def test_quantization_error_is_at_most_half_a_step() -> None:
    weight = torch.randn(5, 32) * torch.tensor([1.0, 100.0, 1e-4, 0.0, 1.0])[:, None]
    values, scale = quantize(weight)
    assert values.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127]
    assert ((values * scale[:, None] - weight).abs() <= scale[:, None] * 0.501).all()


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [[64], [16, 100, 7], [211]])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 64])
def test_products_equal_integer_arithmetic(dtype: torch.dtype, outputs: list[int], rows: int) -> None:
    layers = [linear(48, count, dtype, bias=i % 2 == 0) for i, count in enumerate(outputs)]
    x = (torch.randn(rows, 48) * torch.logspace(-2, 2, rows)[:, None]).to(dtype)
    found = packed(layers)(x)
    assert found.dtype is dtype
    tolerance = 2e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), as_promised(x, layers), rtol=tolerance, atol=1e-6)


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", DTYPES)
def test_libraries_agree_bit_for_bit(dtype: torch.dtype) -> None:
    layer, x = linear(112, 83, dtype, bias=True), torch.randn(9, 112).to(dtype)
    found = packed([layer])(x)
    kernels.choose(LIBRARIES[0])
    assert torch.equal(found, packed([layer])(x))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_independent(dtype: torch.dtype) -> None:
    product, x = packed([linear(80, 130, dtype, bias=True)]), torch.randn(41, 80).to(dtype)
    together = product(x)
    for count in (1, 2, 6, 7, 40):
        assert torch.equal(product(x[:count]), together[:count])
        assert torch.equal(product(x[-count:]), together[-count:])


@pytest.mark.usefixtures("each_library")
def test_nan_stays_in_its_row() -> None:
    product, x = packed([linear(48, 70, torch.bfloat16, bias=True)]), torch.randn(9, 48).bfloat16()
    clean = product(x)
    x[2, 5], x[4, 47], x[7, 0] = float("nan"), float("inf"), float("-inf")
    found = product(x)
    assert not found[[2, 4, 7]].isfinite().any()
    rest = [0, 1, 3, 5, 6, 8]
    assert torch.equal(found[rest], clean[rest])


@pytest.mark.usefixtures("each_library")
def test_zero_row_gives_the_bias() -> None:
    layer = linear(48, 70, torch.float32, bias=True)
    assert torch.equal(packed([layer])(torch.zeros(3, 48)), layer.bias.expand(3, -1))


def test_other_families_are_refused() -> None:
    with pytest.raises(ModelRefused, match=r"a model built like Llama.*gpt2 in float32 on cpu.*quantization at none"):
        to_int8(wrap_model(tiny_model("gpt2")))


def test_large_error_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_INT8_TOLERANCE", 1e-4)
    with pytest.raises(ModelRefused, match="change its logits too much"):
        to_int8(wrap_model(tiny_model("llama", **WIDE)))


def test_settings_reach_hello(tmp_path: Path) -> None:
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    assert runner_with(tmp_path).hello(1).dtype == "float32"
    assert runner_with(tmp_path, quantization="int8").hello(1).dtype == "int8"
    hello = runner_with(tmp_path, kv_cache_dtype="int8").hello(1)
    assert (hello.dtype, hello.attention_backend) == ("float32", "native, int8 KV")
    with pytest.raises(ConfigurationError, match="remove --no-fused-forward"):
        runner_with(tmp_path, quantization="int8", fused_forward=False)
    with pytest.raises(ModelRefused, match=r"torch_paged.*own number format"):
        runner_with(tmp_path, kv_cache_dtype="int8", attention_backend="torch_paged")
