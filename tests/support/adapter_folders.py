"""Folders of LoRA adapters for the toy worker, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def key_of(directory: Path) -> bytes:
    """Return the key of an adapter."""
    return adapter_files.read(directory, 1024).key


def toy_model(directory: Path | None) -> str:
    """Return the `model` argument of `support.toy.expected` for requests with the adapter."""
    return "" if directory is None else with_adapter("", key_of(directory))
