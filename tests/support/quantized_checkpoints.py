"""Checkpoints of tiny models in the formats of quantized weights, written bit by bit by the rules of each format.

Each encoder returns the tensors of one matrix and the matrix that they stand for, in float64 arithmetic of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from support.families import WIDE, tiny_model
from torch import Tensor

GROUP = 32
Encoded = tuple[dict[str, Tensor], Tensor]
Encoder = Callable[[Tensor], Encoded]
Array = npt.NDArray[Any]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Format:
    """A way to store matrices."""

    name: str
    config: dict[str, Any]
    encode: Encoder
    separator: str = "."
    weights: str = ""
    """What the loaded model calls it."""
    skipped: tuple[str, ...] = field(
        default=("embed_tokens", "lm_head", "norm", "router", "mlp.gate.weight", "moe.gate")
    )
    """Parts of the names of tensors that stay plain."""


def write(directory: Path, form: Format, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a model in this format, and its dequantized model beside it. Return the directory of the first."""
    quantized, plain = directory / "quantized", directory / "plain"
    model = tiny_model(family, dtype=dtype, **{**WIDE, **changes})
    for path in (quantized, plain):
        model.save_pretrained(path)
    tensors = load_file(quantized / "model.safetensors")
    dequantized = dict(tensors)
    for name in [name for name in tensors if _is_matrix(name, tensors[name], form)]:
        parts, matrix = form.encode(tensors.pop(name).float())
        dequantized[name] = matrix.to(torch.float32).contiguous()
        module = name.removesuffix(".weight")
        tensors.update({f"{module}{form.separator}{part}": tensor.contiguous() for part, tensor in parts.items()})
    metadata = {"format": "pt"}
    save_file(tensors, quantized / "model.safetensors", metadata)
    save_file(dequantized, plain / "model.safetensors", metadata)
    edit(quantized / "config.json", quantization_config=form.config)
    return quantized


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _is_matrix(name: str, tensor: Tensor, form: Format) -> bool:
    if any(part in name for part in form.skipped) or "bias" in name:
        return False
    return tensor.dim() == 3 if form.name == "mxfp4" else tensor.dim() == 2


# --- words ---------------------------------------------------------------------------------------------------------


def words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [rows, n] into int32 [rows, n * bits / 32]; word position p holds element `order[p]` of each run."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for word in range(packed.shape[1]):
        for position, place in enumerate(order):
            column = word * per_word + place
            if column < codes.shape[1]:
                packed[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * position)
    return torch.from_numpy(packed.view(np.int32))


def rounded(weight: Tensor, bits: int, symmetric: bool, groups: list[list[int]]) -> tuple[Array, Array, Array, Tensor]:
    """Round to unsigned codes [outputs, inputs]; scales (fp16) and zero points [outputs, groups]; and the matrix."""
    w, largest = weight.double().numpy(), 2**bits - 1
    codes = np.zeros(w.shape, np.int64)
    scales, zeros = np.zeros((len(w), len(groups))), np.zeros((len(w), len(groups)), np.int64)
    matrix = np.zeros_like(w)
    for g, inputs in enumerate(groups):
        part = w[:, inputs]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale = np.maximum((high - low) / largest, 1e-6).astype(np.float16).astype(np.float64)
        zero = np.full(len(w), (largest + 1) // 2) if symmetric else np.clip(np.rint(-low / scale), 0, largest)
        codes[:, inputs] = np.clip(np.rint(part / scale[:, None]) + zero[:, None], 0, largest).astype(np.int64)
        scales[:, g], zeros[:, g] = scale, zero.astype(np.int64)
        matrix[:, inputs] = (codes[:, inputs] - zeros[:, g, None]) * scale[:, None]
    return codes, scales, zeros, torch.from_numpy(matrix)


def runs(inputs: int, size: int) -> list[list[int]]:
    """Consecutive groups."""
    return [list(range(start, start + size)) for start in range(0, inputs, size)]


def shuffled(inputs: int, size: int) -> list[list[int]]:
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)).tolist()
    return [sorted(order[start : start + size]) for start in range(0, inputs, size)]


def _half(scales: Array) -> Tensor:
    return torch.from_numpy(scales).half()


# --- formats -------------------------------------------------------------------------------------------------------


def gptq(bits: int, *, symmetric: bool, act_order: bool = False, version: int = 1, g_idx: bool = True) -> Format:
    def encode(weight: Tensor) -> Encoded:
        inputs = weight.shape[1]
        groups = shuffled(inputs, GROUP) if act_order else runs(inputs, GROUP)
        codes, scales, zeros, matrix = rounded(weight, bits, symmetric, groups)
        stored = (zeros - (1 if version == 1 else 0)) & (2**bits - 1)
        parts = {"qweight": words(codes, bits).t(), "qzeros": words(stored.T, bits), "scales": _half(scales.T)}
        if g_idx:
            group_of = {i: g for g, members in enumerate(groups) for i in members}
            parts["g_idx"] = torch.tensor([group_of[i] for i in range(inputs)], dtype=torch.int32)
        return parts, matrix

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    name = (
        f"gptq{bits}-{'sym' if symmetric else 'asym'}-v{version}{'-act' if act_order else ''}{'' if g_idx else '-no-g'}"
    )
    return Format(name, config, encode, weights=f"gptq-{bits}bit")


def awq(version: str) -> Format:
    def encode(weight: Tensor) -> Encoded:
        codes, scales, zeros, matrix = rounded(weight, 4, False, runs(weight.shape[1], GROUP))
        if version == "gemm":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            parts = {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": _half(scales.T)}
        else:
            padded = np.zeros((len(codes), 8), np.int64)
            padded[:, : zeros.shape[1]] = zeros
            wide = np.zeros((len(codes), 8))
            wide[:, : zeros.shape[1]] = scales
            parts = {"qweight": words(codes, 4), "qzeros": words(padded, 4), "scales": _half(wide)}
        return parts, matrix

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": version, "zero_point": True}
    return Format(f"awq-{version}", config, encode, weights="awq-4bit")


def _compressed(form: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, **others}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(bits: int, *, symmetric: bool, act_order: bool = False, strategy: str = "group") -> Format:
    def encode(weight: Tensor) -> Encoded:
        outputs, inputs = weight.shape
        size = GROUP if strategy == "group" else inputs
        groups = shuffled(inputs, size) if act_order else runs(inputs, size)
        codes, scales, zeros, matrix = rounded(weight, bits, symmetric, groups)
        parts = {"weight_packed": words(codes, bits), "weight_scale": _half(scales)}
        parts["weight_shape"] = torch.tensor([outputs, inputs])
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).t()
        if act_order:
            group_of = {i: g for g, members in enumerate(groups) for i in members}
            parts["weight_g_idx"] = torch.tensor([group_of[i] for i in range(inputs)], dtype=torch.int32)
        return parts, matrix

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": GROUP}
    name = f"packed{bits}-{'sym' if symmetric else 'asym'}-{strategy}{'-act' if act_order else ''}"
    config = _compressed("pack-quantized", weights)
    return Format(name, config, encode, weights=f"compressed-tensors-{bits}bit")


def int8(*, symmetric: bool = True) -> Format:
    def encode(weight: Tensor) -> Encoded:
        codes, scales, zeros, _ = rounded(weight, 8, symmetric, runs(weight.shape[1], weight.shape[1]))
        parts = {
            "weight": torch.from_numpy(codes - 128).to(torch.int8),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
        }
        scale = parts["weight_scale"].double()
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
        return parts, torch.from_numpy(codes - zeros) * scale

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    config = _compressed("int-quantized", weights, input_activations=activations)
    return Format(f"w8a8{'' if symmetric else '-asym'}", config, encode, weights="compressed-tensors-8bit")


def float8(name: str, config: dict[str, Any], scale_name: str, block: tuple[int, int] | None, weights: str) -> Format:
    """Float8 with a scale for each block; block (0, 0) is all; None is an output."""

    def encode(weight: Tensor) -> Encoded:
        rows, columns = {None: (1, weight.shape[1]), (0, 0): tuple(weight.shape)}.get(block, block)  # type: ignore[misc]
        count = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scales, values, matrix = torch.zeros(count), torch.zeros(weight.shape).to(torch.float8_e4m3fn), weight.double()
        for r, c in ((r, c) for r in range(count[0]) for c in range(count[1])):
            place = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scales[r, c] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[r, c]).to(torch.float8_e4m3fn)
            matrix[place] = values[place].double() * scales[r, c].double()
        if block == (0, 0):
            scales = scales.view(())
        return {"weight": values, scale_name: scales}, matrix

    return Format(name, config, encode, weights=weights)


def mxfp4() -> Format:
    def encode(weight: Tensor) -> Encoded:  # [experts, inputs, outputs]
        rows = weight.transpose(1, 2)
        groups = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = groups.abs().amax(-1).log2().floor() - 2
        values = torch.tensor(FP4)
        codes = (groups / 2 ** exponents[..., None])[..., None].sub(values).abs().argmin(-1)
        matrix = (values[codes] * 2 ** exponents[..., None]).reshape(rows.shape).transpose(1, 2)
        packed_codes = (codes[..., ::2] + codes[..., 1::2] * 16).to(torch.uint8)
        return {"blocks": packed_codes, "scales": (exponents + 127).to(torch.uint8)}, matrix

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return Format("mxfp4", config, encode, separator="_", weights="mxfp4")


def bitsandbytes() -> Format:
    def encode(weight: Tensor) -> Encoded:
        largest = weight.abs().amax(1)
        values = (weight / largest[:, None] * 127).round().to(torch.int8)
        parts = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, values.double() * (largest.double() / 127)[:, None]

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return Format("bitsandbytes", config, encode, weights="bitsandbytes-8bit")


_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS = {
    form.name: form
    for form in (
        gptq(4, symmetric=True),
        gptq(4, symmetric=True, g_idx=False),
        gptq(4, symmetric=False, act_order=True),
        gptq(8, symmetric=True, act_order=True),
        gptq(8, symmetric=False, version=2),
        gptq(4, symmetric=False, version=2),
        awq("gemm"),
        awq("gemv"),
        packed(4, symmetric=True),
        packed(4, symmetric=False),
        packed(4, symmetric=True, act_order=True),
        packed(8, symmetric=True, strategy="channel"),
        packed(8, symmetric=False),
        int8(),
        int8(symmetric=False),
        float8(
            "ct-fp8",
            _compressed("float-quantized", _FP8_WEIGHTS | {"strategy": "channel"}),
            "weight_scale",
            None,
            "compressed-tensors-fp8",
        ),
        float8(
            "ct-fp8-tensor",
            _compressed("float-quantized", _FP8_WEIGHTS | {"strategy": "tensor"}),
            "weight_scale",
            (0, 0),
            "compressed-tensors-fp8",
        ),
        float8(
            "ct-fp8-block",
            _compressed("float-quantized", _FP8_WEIGHTS | {"strategy": "block", "block_structure": [40, 24]}),
            "weight_scale",
            (40, 24),
            "compressed-tensors-fp8",
        ),
        float8(
            "fp8-block", {"quant_method": "fp8", "weight_block_size": [40, 24]}, "weight_scale_inv", (40, 24), "fp8"
        ),
        float8("fp8-tensor", {"quant_method": "fp8"}, "weight_scale_inv", (0, 0), "fp8"),
        float8("fbgemm", {"quant_method": "fbgemm_fp8"}, "weight_scale", None, "fp8"),
        bitsandbytes(),
        mxfp4(),
    )
}
