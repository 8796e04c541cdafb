"""Products with 4- and 8-bit weights: exact integers, so instruction sets, batches and positions give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import LIBRARIES, needs_kernels
from torch import Tensor, nn
from worker.settings_runner import runner_with

from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.cpu.quantized_linear import QuantizedLinear, by_group, by_row, pack_int8, pack_quantized
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.model import loader
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import to_quantized, wrap_model
from lineclear.worker.quantization.grouped_weight import GroupedWeight

pytestmark = needs_kernels
DTYPES = [torch.float32, torch.bfloat16]
TABLE = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 31], dtype=torch.uint8)
FORMS = [
    *[(bits, group, kind) for bits in (8, 6) for group in (0, 16, 32, 128) for kind in ("plain", "minimum")],
    *[
        (4, group, kind)
        for group in (0, 16, 32, 48, 128)
        for kind in ("symmetric", "minimum", "table", "table+minimum")
    ],
    *[(bits, 32, "order") for bits in (4, 6, 8)],
]
"""Bits (6: in bytes), inputs of a group (0: all), and what else is there."""


def weight_of(outputs: int, inputs: int, bits: int, group: int, kind: str, seed: int = 0) -> GroupedWeight:
    """Return a matrix of extreme and other values, whose scales and minima are small enough to be exact in float16."""
    torch.manual_seed(seed + outputs + inputs + bits + group)
    groups = inputs // (group or inputs)
    if bits > 4:
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (outputs, inputs), dtype=torch.int8)
        codes[0], codes[1:2] = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    else:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        codes[0] = 255
    scale = torch.randint(32, 64, (outputs, groups)) / 1024
    # Channels of very different size: a scale for all of them would lose the small ones.
    size = 2.0 ** torch.arange(outputs)[:, None].remainder(20).sub(15)
    minimum = torch.randint(0, 500, (outputs, groups)) / 1024 if "minimum" in kind else None
    if kind == "symmetric":
        minimum = scale * 8
    order = torch.randperm(inputs) if kind == "order" else None
    table = TABLE if "table" in kind else None
    return GroupedWeight(
        codes, 4 if bits == 4 else 8, scale * size, None if minimum is None else minimum * size, table, order
    )


def product_of(*weights: GroupedWeight, bias: Sequence[Tensor | None] = ()) -> Callable[[Tensor], Tensor]:
    product = QuantizedLinear(list(zip(weights, bias or [None] * len(weights), strict=True)), HugePageArena())
    outputs = sum(weight.shape[0] for weight in weights)
    return lambda x: product(x.contiguous(), x.new_empty(len(x), outputs))


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(count + inputs)
    return (torch.randn(count, inputs) * torch.logspace(-2, 2, count)[:, None]).to(dtype)


def as_promised(x: Tensor, weight: GroupedWeight) -> tuple[Tensor, Tensor]:
    """Return the product of the same integers in float64, and the sum of the magnitudes of what it adds."""
    ordered = x.float() if weight.input_order is None else x.float()[:, weight.input_order]
    groups = ordered.view(len(x), weight.scale.shape[1], weight.group_size)
    largest = groups.abs().amax(dim=2, keepdim=True)
    # torch computes 127 / x as a reciprocal times 127; the kernel divides, and multiplies without rounding in between.
    whole = (groups.double() * torch.tensor(127.0).div(largest).double()).nan_to_num().round()
    inputs = (whole * largest / 127).flatten(1)
    matrix = weight.values().double().view(weight.shape[0], -1, weight.group_size) * weight.scale.double()[:, :, None]
    if weight.minimum is not None:
        matrix -= weight.minimum.double()[:, :, None]
    matrix = matrix.flatten(1)
    return inputs @ matrix.T, inputs.abs() @ matrix.abs().T


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize(("bits", "group", "kind"), FORMS)
def test_products_equal_integer_arithmetic(bits: int, group: int, kind: str) -> None:
    for outputs in (1, 64, 83):
        weight = weight_of(outputs, 384, bits, group, kind)
        product = product_of(weight)
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 70):
            x = rows_of(rows, 384)
            expected, size = as_promised(x, weight)
            assert ((product(x).double() - expected).abs() <= 2e-6 * size).all(), (outputs, rows)


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("form", [by_row, by_group])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_close_to_those_of_the_matrix(form: Callable[[Tensor], GroupedWeight], dtype: torch.dtype) -> None:
    """With scales and minima as they come, of which float16 keeps 11 bits."""
    torch.manual_seed(1)
    weight = form(torch.randn(50, 256))
    x = torch.randn(9, 256).to(dtype)
    expected = x.double() @ weight.dequantized(torch.float64).T
    found = product_of(weight)(x)
    assert found.dtype is dtype
    assert (found.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize(("bits", "group", "kind"), FORMS[::3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_libraries_agree_bit_for_bit(dtype: torch.dtype, bits: int, group: int, kind: str) -> None:
    weight, x = weight_of(83, 384, bits, group, kind), rows_of(9, 384, dtype)
    torch.manual_seed(5)
    bias = torch.randn(83)
    found = product_of(weight, bias=[bias])(x)
    kernels.choose(LIBRARIES[0])
    assert torch.equal(found, product_of(weight, bias=[bias])(x))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize(("bits", "group", "kind"), FORMS[1::3])
def test_rows_are_independent(bits: int, group: int, kind: str) -> None:
    product, x = product_of(weight_of(130, 384, bits, group, kind)), rows_of(41, 384)
    together = product(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 40):
        assert torch.equal(product(x[:count]), together[:count])
        assert torch.equal(product(x[-count:]), together[-count:])


@pytest.mark.usefixtures("each_library")
def test_results_do_not_depend_on_the_threads() -> None:
    product, x = product_of(weight_of(130, 384, 4, 32, "minimum"), weight_of(20, 384, 8, 16, "plain")), rows_of(9, 384)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize(
    ("bits", "group", "kind"),
    [(8, 0, "plain"), (6, 16, "plain"), (4, 32, "minimum"), (4, 16, "table"), (4, 32, "order")],
)
def test_non_finite_inputs_stay_in_their_row(bits: int, group: int, kind: str) -> None:
    weight = weight_of(70, 384, bits, group, kind)
    weight.scale[3] = 0.0
    product, x = product_of(weight), torch.randn(9, 384).bfloat16()
    clean = product(x)
    x[2, 5], x[4, 47], x[7, 0] = float("nan"), float("inf"), float("-inf")
    found = product(x)
    assert not found[[2, 4, 7]].isfinite().any()
    rest = [0, 1, 3, 5, 6, 8]
    assert torch.equal(found[rest], clean[rest])


@pytest.mark.usefixtures("each_library")
def test_zero_row_gives_the_bias() -> None:
    bias = torch.randn(70)
    for weight in (weight_of(70, 48, 8, 0, "plain"), weight_of(70, 48, 4, 16, "minimum")):
        assert torch.equal(product_of(weight, bias=[bias])(torch.zeros(3, 48)), bias.expand(3, -1))


@pytest.mark.usefixtures("each_library")
def test_parts_of_a_product_may_have_different_forms() -> None:
    """As queries, keys and values in GGUF files."""
    forms = [
        (8, 0, "plain"),
        (4, 32, "minimum"),
        (4, 32, "minimum"),
        (6, 16, "plain"),
        (8, 16, "order"),
        (4, 0, "table"),
        (8, 0, "plain"),
    ]
    weights = [weight_of(outputs, 96, *form) for outputs, form in zip((16, 7, 33, 50, 1, 20, 64), forms, strict=True)]
    bias = [None if i % 2 else torch.randn(weight.shape[0]) for i, weight in enumerate(weights)]
    x = rows_of(11, 96)
    alone = [product_of(weight, bias=[b])(x) for weight, b in zip(weights, bias, strict=True)]
    assert torch.equal(product_of(*weights, bias=bias)(x), torch.cat(alone, dim=1))


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize(("least", "most", "byte"), [(-32, 31, 0.75), (-33, 31, 1), (-32, 32, 1)])
def test_bytes_of_six_bits_take_six(least: int, most: int, byte: float) -> None:
    if "avx512" in kernels.library_name():
        byte = 1
    codes = torch.zeros(64, 96, dtype=torch.int8)
    codes[3, 5], codes[63, 95] = least, most
    weight = GroupedWeight(codes, 8, torch.ones(64, 6))
    product = QuantizedLinear([(weight, None)], HugePageArena())
    torch.testing.assert_close(product(torch.eye(96), torch.empty(96, 64)), codes.float().T)
    assert max(array.nbytes for array in product._arrays) == 64 * (96 * byte + 6 * 2)


@pytest.mark.usefixtures("each_library")
def test_scales_of_any_size_are_kept() -> None:
    """Of groups of zeros, with a minimum alone, and beyond the range of float16."""
    weight = weight_of(40, 96, 4, 32, "minimum")
    assert weight.minimum is not None
    weight.scale[:8], weight.minimum[8:12] = 0.0, 0.0
    weight.scale[12:16], weight.minimum[12:16] = 0.0, 0.0
    for part in (weight.scale, weight.minimum):
        part[20:30] *= 2.0**90
        part[30:40] *= 2.0**-90
    x = rows_of(3, 96)
    expected, size = as_promised(x, weight)
    assert ((product_of(weight)(x).double() - expected).abs() <= 2e-6 * size).all()


def test_weights_that_kernels_cannot_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups of 48 inputs: groups must have a multiple of 16"):
        product_of(weight_of(8, 48, 4, 24, "plain"))
    with pytest.raises(ValueError, match=r"1 groups of 131072 inputs.*up to 65536"):
        product_of(weight_of(1, 1 << 17, 8, 0, "plain"))
    good = weight_of(8, 64, 4, 32, "table+minimum")
    ones = torch.ones(8, 2)
    for field, bad, match in (
        ("scale", torch.ones(8, 3), "3 groups of 64 inputs"),
        ("scale", torch.ones(7, 2), "are not 8 x 2 finite numbers"),
        ("scale", ones * float("nan"), "are not 8 x 2 finite numbers"),
        ("minimum", torch.ones(8, 1), "are not 8 x 2 finite numbers"),
        ("minimum", ones * float("inf"), "are not 8 x 2 finite numbers"),
        ("table", torch.full((16,), 32, dtype=torch.uint8), "16 values up to 31"),
        ("table", TABLE[:15], "16 values up to 31"),
        ("input_order", torch.arange(63), "no permutation"),
        ("input_order", torch.arange(1, 65), "no permutation"),
    ):
        with pytest.raises(ValueError, match=match):
            product_of(replace(good, **{field: bad}))  # type: ignore[arg-type]


@pytest.mark.usefixtures("each_library")
def test_layers_and_quantized_layers_are_packed() -> None:
    torch.manual_seed(2)
    layers = [nn.Linear(48, 16), nn.Linear(48, 100, bias=False), nn.Linear(48, 7)]
    quantized = [SimpleNamespace(weight=by_row(layer.weight.detach()), bias=layer.bias) for layer in layers]
    x, arena = torch.randn(5, 48), HugePageArena()
    found = pack_int8(layers, arena)(x, torch.empty(5, 123))
    assert torch.equal(found, pack_quantized(quantized, arena)(x, torch.empty(5, 123)))
    torch.testing.assert_close(found, torch.cat([layer(x) for layer in layers], dim=1), rtol=0.02, atol=0.02)


def test_other_families_are_refused() -> None:
    with pytest.raises(ModelRefused, match=r"int4 weights need a model of a fused family.*gpt2 in float32 on cpu"):
        to_quantized(wrap_model(tiny_model("gpt2")), "int4")


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_large_error_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_QUANTIZED_TOLERANCE", 1e-4)
    with pytest.raises(ModelRefused, match=f"{form} weights change its logits too much"):
        to_quantized(wrap_model(tiny_model("llama", **WIDE)), form)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_settings_reach_hello(form: str, tmp_path: Path) -> None:
    tiny_model("llama", seed=2, **WIDE).save_pretrained(tmp_path)
    assert runner_with(tmp_path).hello(1).dtype == "float32"
    assert runner_with(tmp_path, quantization=form).hello(1).dtype == form
    hello = runner_with(tmp_path, kv_cache_dtype="int8").hello(1)
    assert (hello.dtype, hello.attention_backend) == ("float32", "native, int8 KV")
    with pytest.raises(ConfigurationError, match=f"--quantization {form}.*remove --no-fused-forward"):
        runner_with(tmp_path, quantization=form, fused_forward=False)
    with pytest.raises(ModelRefused, match=r"torch_paged.*own number format"):
        runner_with(tmp_path, kv_cache_dtype="int8", attention_backend="torch_paged")
