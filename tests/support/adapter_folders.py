"""Folders of LoRA adapters, written without torch: for the toy worker, and random ones for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.toy import with_adapter

from lineclear.model_files import adapter_files


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
    """Write an adapter of all attention and MLP modules of a model built like Llama, as PEFT would save it."""
    directory.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    # module: inputs, outputs
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = (rng.standard_normal(shape) * size).astype(np.float32)
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{factor}.weight"] = values
    save_file(tensors, directory / adapter_files.WEIGHTS)
    names = sorted(name.rpartition(".")[2] for name in shapes)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    (directory / adapter_files.CONFIG).write_text(json.dumps(settings))
    return directory


def key_of(directory: Path) -> bytes:
    return adapter_files.read(directory, 1024).key


def toy_model(directory: Path | None) -> str:
    """Return the `model` argument of `support.toy.expected` for requests with the adapter."""
    return "" if directory is None else with_adapter("", key_of(directory))
