"""Reads the two files of a PEFT LoRA adapter as far as that needs no torch, and refuses what cannot be served.

The scheduler checks an adapter before the workers load it; the worker reads the files again and compares their digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_directory import ModelNames, short_name
from .safetensors_check import CheckpointBroken, Tensor, check_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES, _MAX_HEADER_BYTES, _MAX_WEIGHT_BYTES = 1 << 20, 16 << 20, 4 << 30
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_DTYPES = ("F32", "BF16", "F16")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_UNSUPPORTED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "lora_bias": "biases of adapters (lora_bias) are not supported",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out) are not supported",
    "rank_pattern": "ranks by module (rank_pattern) are not supported",
    "alpha_pattern": "scales by module (alpha_pattern) are not supported",
    "trainable_token_indices": "embeddings of single tokens (trainable_token_indices) are not supported",
    "target_parameters": "adapters of parameters (target_parameters) are not supported",
    "layer_replication": "repeated layers (layer_replication) are not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "use_qalora": "QALoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
}
"""Settings of PEFT's LoraConfig that change the arithmetic, with the reason why an adapter that has one is refused."""


class AdapterFilesRefused(ValueError):
    """The adapter cannot be served; the message says why and names no content."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Description of an adapter without its values."""

    key: bytes
    """Digest of both files."""
    rank: int
    scale: float
    """Factor of the product: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    base_model: str
    """The model that it was made for, as its config says: a path or a repository."""
    base_revision: str
    """The commit of that model; empty if the config names none."""
    shapes: dict[str, tuple[int, int]]
    """(inputs, outputs) of each module that it changes, by the module's path in the model."""


def read(directory: Path, max_rank: int, weights: bytes | None = None) -> AdapterFiles:
    """Check the adapter in `directory`; `weights` is the content of its tensor file, if read already.

    Raises AdapterFilesRefused, and OSError if a file cannot be read.
    """
    _check_names(directory)
    raw_config = _bounded(directory / CONFIG, _MAX_CONFIG_BYTES)
    config = _object(raw_config)
    rank, scale = _check_config(config, max_rank)
    digest = hashlib.sha256(len(raw_config).to_bytes(8, "little") + raw_config)
    if weights is None:
        path = directory / WEIGHTS
        if (size := path.stat().st_size) > _MAX_WEIGHT_BYTES:
            raise AdapterFilesRefused(f"{WEIGHTS} has {size} bytes, more than {_MAX_WEIGHT_BYTES}")
        with path.open("rb") as file:
            tensors = _tensors(file.read(8), lambda length: file.read(length), size)
            file.seek(0)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    else:
        tensors = _tensors(weights[:8], lambda length: weights[8 : 8 + length], len(weights))
        digest.update(weights)
    model, revision = (str(config.get(name) or "") for name in ("base_model_name_or_path", "revision"))
    return AdapterFiles(digest.digest(), rank, scale, model, revision, _shapes(tensors, rank))


def other_base(files: AdapterFiles, served: ModelNames) -> str:
    """Return a sentence if the adapter was made for another model than the served one, as far as names tell.

    Another model may have layers of the same shapes, and answers are then wrong without an error.
    """
    made_for = files.base_model
    if not made_for:
        return ""
    if short_name(made_for) not in served.names and Path(made_for).expanduser().resolve() != served.directory:
        known = f", which is known as {', '.join(sorted(served.names))}"
        return f"it was made for {made_for}, and another model is served{known}; compare both, or load the one for it"
    revision, ours = files.base_revision, served.revision
    if _COMMIT.fullmatch(revision) and ours and not ours.startswith(revision):
        return f"it was made for the commit {revision} of {made_for}, and the commit {ours} is served"
    return ""


def _check_names(directory: Path) -> None:
    if not directory.is_dir():
        raise AdapterFilesRefused("there is no such directory")
    if not (directory / CONFIG).is_file():
        raise AdapterFilesRefused(f"the directory has no {CONFIG}")
    if not (directory / WEIGHTS).is_file():
        if any(path.suffix in (".bin", ".pt", ".pth", ".ckpt") for path in directory.iterdir()):
            raise AdapterFilesRefused("its weights are pickle files, which can run code when read; save safetensors")
        raise AdapterFilesRefused(f"the directory has no {WEIGHTS}")


def _bounded(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        found = file.read(limit + 1)
    if len(found) > limit:
        raise AdapterFilesRefused(f"{path.name} has more than {limit} bytes")
    return found


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise AdapterFilesRefused(f"{CONFIG} is not JSON") from None
    if not isinstance(found, dict):
        raise AdapterFilesRefused(f"{CONFIG} is not a JSON object")
    return found


def _check_config(config: dict[str, Any], max_rank: int) -> tuple[int, float]:
    if config.get("peft_type") != "LORA":
        raise AdapterFilesRefused("its peft_type is not LORA")
    for name, reason in _UNSUPPORTED.items():
        if config.get(name):
            raise AdapterFilesRefused(reason)
    if config.get("bias", "none") != "none":
        raise AdapterFilesRefused("it changes biases of the model; train it with bias none")
    if not isinstance(init := config.get("init_lora_weights", True), bool) and init not in ("gaussian", "orthogonal"):
        raise AdapterFilesRefused("its init_lora_weights changes the weights of the model; convert it to plain LoRA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterFilesRefused("its rank (r) is not a positive integer")
    if rank > max_rank:
        raise AdapterFilesRefused(f"its rank is {rank}, the limit is {max_rank}; raise --max-lora-rank")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e6:
        raise AdapterFilesRefused("its lora_alpha is not a number")
    return rank, float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _tensors(length_field: bytes, read_bytes: Callable[[int], bytes], size: int) -> list[Tensor]:
    length = int.from_bytes(length_field, "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise AdapterFilesRefused(f"{WEIGHTS} is no safetensors file, or it is cut short")
    try:
        return check_header(WEIGHTS, read_bytes(length), size - 8 - length)
    except CheckpointBroken as error:
        raise AdapterFilesRefused(str(error)) from None


def _shapes(tensors: list[Tensor], rank: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each module. Raises AdapterFilesRefused for tensors that are not a pair of LoRA factors."""
    found: dict[str, dict[str, int]] = {}
    for _, _, name, dtype, shape in tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterFilesRefused(f"the tensor {name[:120]} is no factor of a linear layer (lora_A, lora_B)")
        factor = match["factor"]
        if len(shape) != 2 or dtype not in _DTYPES:
            raise AdapterFilesRefused(f"the tensor {name[:120]} is no matrix of {', '.join(_DTYPES)}")
        width, own_rank = (shape[1], shape[0]) if factor == "A" else (shape[0], shape[1])
        if own_rank != rank:
            raise AdapterFilesRefused(f"the tensor {name[:120]} has shape {shape}, which is not of rank {rank}")
        found.setdefault(match["module"], {})[factor] = width
    for module, widths in found.items():
        if len(widths) != 2:
            raise AdapterFilesRefused(f"it has only one factor of {module[:120]}")
    if not found:
        raise AdapterFilesRefused(f"{WEIGHTS} has no tensors")
    return {module: (widths["A"], widths["B"]) for module, widths in found.items()}
