"""What a worker says it has loaded: the same for copies, another one for other formats, and never a mixture."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.natives import needs_kernels

from lineclear.worker import loader
from lineclear.worker.model import ModelFilesChanged
from lineclear.worker.settings import WorkerSettings
from lineclear.worker.start import make_runner


def fingerprint(model: Path, **flags: Any) -> str:
    settings = WorkerSettings(model=str(model), directory="/d", num_blocks=8, device="cpu", threads=1, **flags)
    return make_runner(settings).hello(1).model_fingerprint


@needs_kernels
def test_copies_are_one_model_and_every_number_format_is_another(tmp_path: Path) -> None:
    model, copy = tmp_path / "a", tmp_path / "b"
    tiny_model("llama", **WIDE).save_pretrained(model)
    shutil.copytree(model, copy)
    one = fingerprint(model)
    assert one
    assert fingerprint(copy) == one
    others = [
        fingerprint(model, dtype="bfloat16"),
        fingerprint(model, weights="int8"),
        fingerprint(model, kv_cache_dtype="int8"),
    ]
    tiny_model("llama", seed=1, **WIDE).save_pretrained(copy)
    others.append(fingerprint(copy))
    assert len({one, *others}) == 5


def test_a_directory_that_is_swapped_while_it_is_loaded_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "a")
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "b")
    original = loader._from_pretrained

    def swapping(*arguments: Any) -> Any:
        found = original(*arguments)
        (tmp_path / "b" / "model.safetensors").rename(tmp_path / "a" / "model.safetensors")
        return found

    monkeypatch.setattr(loader, "_from_pretrained", swapping)
    with pytest.raises(ModelFilesChanged, match="changed while it was loaded"):
        loader.load(str(tmp_path / "a"), torch.device("cpu"), None)
