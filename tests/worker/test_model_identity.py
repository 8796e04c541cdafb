"""Model fingerprints: equal for copies, different for other formats, and never of a mixture of files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import needs_kernels
from transformers import AutoModelForCausalLM
from worker.settings_runner import runner_with

from lineclear.worker.model import loader
from lineclear.worker.model.loaded_model import LoadedModel, ModelFilesChanged


def fingerprint(model: Path, **flags: Any) -> str:
    return runner_with(model, **flags).hello(1).model_fingerprint


@needs_kernels
def test_fingerprint_depends_on_files_and_formats(tmp_path: Path) -> None:
    model, copy = tmp_path / "a", tmp_path / "b"
    tiny_model("llama", **WIDE).save_pretrained(model)
    shutil.copytree(model, copy)
    one = fingerprint(model)
    assert one
    assert fingerprint(copy) == one
    others = [
        fingerprint(model, dtype="bfloat16"),
        fingerprint(model, quantization="int8"),
        fingerprint(model, kv_cache_dtype="int8"),
    ]
    tiny_model("llama", seed=1, **WIDE).save_pretrained(copy)
    others.append(fingerprint(copy))
    assert len({one, *others}) == 5


def load_while(act: Callable[[], object], model: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Load `model`, and `act` once its weights are read."""
    original = AutoModelForCausalLM.from_pretrained

    def acting(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        act()
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", acting)
    return loader.load(str(model), torch.device("cpu"), None)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    tiny_model("llama").save_pretrained(tmp_path / "a")
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def same_times(one: Path, other: Path) -> None:
    """Give the files of both directories one time, as an image or an archive that is built reproducibly has it."""
    for path in (*one.iterdir(), *other.iterdir()):
        os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("has_same_times", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_file_swapped_during_load_is_detected(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str, has_same_times: bool
) -> None:
    one, other = models
    if name != "model.safetensors":
        (other / name).write_bytes((other / name).read_bytes().replace(b"2", b"3"))
    if has_same_times:
        same_times(one, other)
    with pytest.raises(ModelFilesChanged, match="changed while it was loaded"):
        load_while(lambda: (other / name).rename(one / name), one, monkeypatch)


@pytest.mark.parametrize("has_same_times", [False, True])
def test_changed_link_during_load_is_detected(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_same_times: bool
) -> None:
    """The files of a Kubernetes volume are links into a directory that is a link itself, which is replaced."""
    one, other = models
    if has_same_times:
        same_times(*models)
    volume, data = tmp_path / "volume", tmp_path / "volume" / "..data"
    volume.mkdir()
    data.symlink_to(one)
    for path in one.iterdir():
        (volume / path.name).symlink_to(Path("..data") / path.name)

    def swap() -> None:
        (volume / "..data_tmp").symlink_to(other)
        (volume / "..data_tmp").rename(data)

    with pytest.raises(ModelFilesChanged, match="changed while it was loaded"):
        load_while(swap, volume, monkeypatch)


def test_new_inode_of_the_same_file_is_accepted(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE and network file systems may give the same file a new inode number."""
    one = models[0]

    def renumber() -> None:
        for path in one.iterdir():
            copy = tmp_path / "copy"
            shutil.copy2(path, copy)
            assert copy.stat().st_ino != path.stat().st_ino
            copy.rename(path)

    assert load_while(renumber, one, monkeypatch).weights_fingerprint
