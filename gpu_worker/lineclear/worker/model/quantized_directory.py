"""Writes a model directory with the matrices that `--quantization` makes while loading.

The format is compressed-tensors' pack-quantized (quantization/compressed_tensors.py), which vLLM and transformers read.
Tensors are read, quantized and written one after the other. A directory appears under its name when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lineclear.model_files import config_check, fingerprint
from lineclear.model_files import safetensors_check as files
from lineclear.worker.decoder.decoder_layers import describe
from lineclear.worker.quantization import compressed_tensors
from lineclear.worker.quantization.grouped_weight import quantize

from .loaded_model import ModelRefused

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BYTES = {"I64": 8, "I32": 4, "BF16": 2}
_OTHER_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"})


class _Form(NamedTuple):
    """How a matrix is quantized."""

    bits: int
    group: int
    """The largest number of inputs of a group; 0: all."""

    def group_of(self, inputs: int) -> int:
        """Return the inputs of a group, which divide those of the matrix."""
        return math.gcd(inputs, self.group)


class _Matrices(NamedTuple):
    forms: dict[str, _Form]
    """By module."""
    output_layer: str
    embedding: str
    """The tensor that is output layer, too; empty if it has its own."""

    def roles(self, name: str) -> Iterator[tuple[str, _Form | None]]:
        """Yield a tensor of the checkpoint itself, or as the matrix of a module."""
        module = name.removesuffix(".weight")
        if module not in self.forms:
            yield name, None
        elif module != self.output_layer or not self.embedding:
            yield module, self.forms[module]
        if name == self.embedding:
            yield self.output_layer, self.forms[self.output_layer]


class _Shard(NamedTuple):
    """A file of weights: the tensors read, and those written in their place."""

    path: Path
    tensors: list[files.Tensor]
    header: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return max((entry["data_offsets"][1] for entry in self.header.values()), default=0)


def write(source: Path, target: Path, bits: int, group: int) -> int:
    """Quantize the model in `source` into the new directory `target`, and return the bytes of its weights.

    The output layer gets 8 bits, with a scale for each output. All else becomes bfloat16. Raises ModelRefused and
    OSError; there is no `target` then.
    """
    matrices = _matrices_of(source, bits, group)
    shards = [_shard(path, matrices) for path in fingerprint.weight_files(source)]
    _check_complete(matrices, shards)
    others = [path for path in source.iterdir() if path.is_file() and path.suffix.lower() not in _OTHER_WEIGHTS]
    others = [path for path in others if path.name not in (fingerprint.CONFIG_FILE, files.INDEX)]
    needed = sum(shard.num_bytes for shard in shards) + sum(path.stat().st_size for path in others)
    if (free := shutil.disk_usage(target.parent).free) < needed:
        raise ModelRefused(f"it would take {needed >> 20} MiB, and {target.parent} has {free >> 20} MiB free")
    made = target.parent / f".{target.name}.{os.getpid()}"
    try:
        made.mkdir()
        for shard in shards:
            _write_shard(shard, made / shard.path.name, matrices)
        if len(shards) > 1:
            weight_map = {name: shard.path.name for shard in shards for name in shard.header}
            index = {"metadata": {"total_size": sum(shard.num_bytes for shard in shards)}, "weight_map": weight_map}
            _write_json(made / files.INDEX, index)
        for path in others:
            shutil.copyfile(path, made / path.name)
        _write_json(made / fingerprint.CONFIG_FILE, _config(source, matrices, shards))
        made.rename(target)  # fails if a file or a directory with files exists by now
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return sum(shard.num_bytes for shard in shards)


def _matrices_of(source: Path, bits: int, group: int) -> _Matrices:
    """Return the matrices of the products of a fused forward pass. Raises ModelRefused for a model without one."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    is_transposed = any(isinstance(module, Conv1D) for module in model.modules())
    decoder = None if is_transposed else describe(model, 1, 1, 1)
    if decoder is None or decoder.experts is not None:
        raise ModelRefused(f"the type {config.model_type} cannot be quantized; docs/supported.md lists fused families")
    names = {module: name for name, module in model.named_modules()}
    parts = (part for layer in decoder.layers for product in layer.products for part in product)
    forms = {part.module: _Form(bits, group if bits == 4 else 0) for part in parts}
    embedding, output_layer = model.get_input_embeddings(), names[decoder.output_layer]
    is_tied = decoder.output_layer.weight is embedding.weight
    return _Matrices(forms | {output_layer: _Form(8, 0)}, output_layer, f"{names[embedding]}.weight" if is_tied else "")


def _check_complete(matrices: _Matrices, shards: Sequence[_Shard]) -> None:
    written = {name for shard in shards for name in shard.header}
    if absent := [module for module in matrices.forms if f"{module}.weight_packed" not in written]:
        raise ModelRefused(f"its files lack {len(absent)} matrices that its config.json asks for, as {absent[0]}")


def _shard(path: Path, matrices: _Matrices) -> _Shard:
    """Plan a file. Raises ModelRefused for matrices of another form."""
    tensors = files.tensors_of(path)
    planned = {
        name: (kind, shape)
        for tensor in tensors
        for role, form in matrices.roles(tensor.name)
        for name, kind, shape in _parts(tensor, role, form)
    }
    header, at = dict[str, Any](), 0
    for name in sorted(planned, key=lambda name: (-_ITEM_BYTES[planned[name][0]], name)):  # each is aligned
        kind, shape = planned[name]
        end = at + _ITEM_BYTES[kind] * math.prod(shape)
        header[name], at = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}, end
    return _Shard(path, tensors, header)


def _parts(tensor: files.Tensor, role: str, form: _Form | None) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, number format and shape of what `_made` makes. Raises ModelRefused."""
    if tensor.dtype not in _FLOATS or (form is not None and len(tensor.shape) != 2):
        raise ModelRefused(f"its tensor {tensor.name} is {tensor.dtype} {tensor.shape}, which cannot be quantized")
    if form is None:
        yield role, "BF16", tensor.shape
        return
    outputs, inputs = tensor.shape
    if inputs % 16:
        raise ModelRefused(f"its matrix {tensor.name} has {inputs} inputs, no multiple of 16")
    groups = inputs // form.group_of(inputs)
    yield f"{role}.weight_packed", "I32", [outputs, inputs * form.bits // 32]
    yield f"{role}.weight_scale", "BF16", [outputs, groups]
    yield f"{role}.weight_shape", "I64", [2]
    if form.bits == 4:
        yield f"{role}.weight_zero_point", "I32", [-(-outputs * form.bits // 32), groups]


def _made(tensor: Tensor, role: str, form: _Form | None) -> Mapping[str, Tensor]:
    if form is None:
        return {role: tensor}
    parts = compressed_tensors.stored(quantize(tensor, form.bits, form.group_of(tensor.shape[1])))
    return {f"{role}.{part}": value for part, value in parts.items()}


def _write_shard(shard: _Shard, target: Path, matrices: _Matrices) -> None:
    raw = json.dumps({"__metadata__": {"format": "pt"}, **shard.header}).encode()
    raw += b" " * (-len(raw) % 8)
    with shard.path.open("rb") as source, target.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in shard.tensors:
            read = _read(source, tensor, shard.path.stat().st_size - shard.tensors[-1].end)
            for role, form in matrices.roles(tensor.name):
                for name, part in _made(read, role, form).items():
                    entry = shard.header[name]
                    assert list(part.shape) == entry["shape"], name
                    out.seek(8 + len(raw) + entry["data_offsets"][0])
                    out.write(part.contiguous().flatten().view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())


def _read(file: BinaryIO, tensor: files.Tensor, data_start: int) -> Tensor:
    file.seek(data_start + tensor.start)
    stored = torch.empty(tensor.end - tensor.start, dtype=torch.uint8)
    file.readinto(stored.numpy().data)  # type: ignore[attr-defined]
    return stored.view(_FLOATS[tensor.dtype]).view(tensor.shape).bfloat16()


def _config(source: Path, matrices: _Matrices, shards: Sequence[_Shard]) -> dict[str, Any]:
    modules: dict[tuple[int, int], list[str]] = {}
    header = {name: entry for shard in shards for name, entry in shard.header.items()}
    for module, form in matrices.forms.items():
        words = header[f"{module}.weight_packed"]["shape"][1]
        group = form.group and form.group_of(words * 32 // form.bits)
        modules.setdefault((form.bits, group), []).append(module)
    most = max(modules, key=lambda key: len(modules[key]))
    # Names count more than classes, and come first. vLLM's output layer is of another class.
    modules[most] = ["Linear", *(module for module in modules.pop(most) if module == matrices.output_layer)]
    groups = {f"group_{i}": _config_group(*key, targets) for i, (key, targets) in enumerate(modules.items())}
    config = dict(config_check.read(source / fingerprint.CONFIG_FILE))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
    config["tie_word_embeddings"] = False
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
    }
    return config


def _config_group(bits: int, group: int, targets: list[str]) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": bits == 8, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"targets": targets, "weights": weights, "format": "pack-quantized"}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
