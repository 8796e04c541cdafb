"""Folders of LoRA adapters, written without torch: for the toy worker, and random ones for a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from support.toy import with_adapter

from lineclear.model_files import adapter_files

_PROJECTION = re.compile(r"(.*layers\.\d+\..*?(\w*_proj\w*|w[123]))\.weight")


def write_adapter(directory: Path, seed: int, rank: int = 2, **config: Any) -> Path:
    """Write an adapter of one module whose content depends on `seed`."""
    directory.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "base_model_name_or_path": "toy"} | config
    (directory / adapter_files.CONFIG).write_text(json.dumps(settings))
    size = 4 * 3 * rank
    header = {
        f"base_model.model.layer.lora_{factor}.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for factor, shape, offsets in (("A", [rank, 3], [0, size]), ("B", [3, rank], [size, 2 * size]))
    }
    raw = json.dumps(header).encode()
    data = len(raw).to_bytes(8, "little") + raw + bytes([seed]) * (2 * size)
    (directory / adapter_files.WEIGHTS).write_bytes(data)
    return directory


def write_random_adapter(directory: Path, model: Path, seed: int, rank: int = 8, size: float = 0.1) -> Path:
    """Write an adapter of all projections in the layers of a model, as PEFT would save it; experts have none."""
    directory.mkdir(parents=True)
    rng, tensors, names = np.random.default_rng(seed), {}, set[str]()
    with safe_open(model / "model.safetensors", framework="np") as weights:
        for key in sorted(weights.keys()):
            found = _PROJECTION.fullmatch(key)
            shape = weights.get_slice(key).get_shape()
            if found is None or len(shape) != 2 or "expert" in key:
                continue
            names.add(found[2])
            for factor, factor_shape in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = (rng.standard_normal(factor_shape) * size).astype(np.float32)
                tensors[f"base_model.model.{found[1]}.lora_{factor}.weight"] = values
    save_file(tensors, directory / adapter_files.WEIGHTS)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(names)}
    (directory / adapter_files.CONFIG).write_text(json.dumps(settings))
    return directory


def key_of(directory: Path) -> bytes:
    return adapter_files.read(directory, 1024).key


def toy_model(directory: Path | None) -> str:
    """Return the `model` argument of `support.toy.expected` for requests with the adapter."""
    return "" if directory is None else with_adapter("", key_of(directory))
