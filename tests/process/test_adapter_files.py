"""Adapters of another model, and damaged ones: a warning, or a sentence, at the load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.adapter_folders import write_adapter

from lineclear.model_files import adapter_files
from lineclear.model_files.adapter_files import WEIGHTS, AdapterFilesRefused
from lineclear.model_files.model_directory import names_of

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


def model(directory: Path, **config: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return directory


def warning(tmp_path: Path, directory: Path, base: str, revision: str = "", *given: str) -> str:
    adapter = write_adapter(tmp_path / "adapter", 1, base_model_name_or_path=base, revision=revision or None)
    return adapter_files.other_base(adapter_files.read(adapter, 8), names_of(directory, *given))


@pytest.mark.parametrize("base", ["", "Llama-3.2-1B", "meta-llama/Llama-3.2-1B", "/mnt/models/llama-3.2-1b/"])
def test_adapter_of_the_served_model_has_no_warning(base: str, tmp_path: Path) -> None:
    assert warning(tmp_path, model(tmp_path / "llama-3.2-1B"), base) == ""


def test_the_served_name_the_path_and_the_configuration_count(tmp_path: Path) -> None:
    directory = model(tmp_path / "checkpoint", _name_or_path="org/base-a")
    adapter = adapter_files.read(write_adapter(tmp_path / "x", 1, base_model_name_or_path="org/base-b"), 8)
    assert adapter_files.other_base(adapter, names_of(directory))
    assert not adapter_files.other_base(adapter, names_of(directory, "base-b"))
    assert not adapter_files.other_base(adapter, names_of(model(tmp_path / "c2", _name_or_path="org/base-b")))


def test_adapter_of_another_model_has_a_warning(tmp_path: Path) -> None:
    said = warning(tmp_path, model(tmp_path / "Llama-3.2-1B"), "meta-llama/Llama-3.1-1B", "", "chat")
    assert said.startswith("it was made for meta-llama/Llama-3.1-1B, and another model is served, which is known as ")
    assert "chat, llama-3.2-1b" in said


@pytest.mark.parametrize(
    ("revision", "differs"), [(COMMIT, False), (COMMIT[:8], False), (OTHER, True), ("main", False)]
)
def test_the_commit_counts_where_both_are_known(revision: str, differs: bool, tmp_path: Path) -> None:
    snapshot = model(tmp_path / "models--org--base" / "snapshots" / COMMIT)
    said = warning(tmp_path, snapshot, "org/base", revision)
    assert bool(said) == differs
    assert not differs or f"the commit {COMMIT} is served" in said


@pytest.mark.parametrize(("size", "says"), [(-1, "is cut short by 1 bytes"), (1, "has 1 bytes after its last tensor")])
def test_damaged_factors_are_refused_with_a_sentence(size: int, says: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 1) / WEIGHTS
    data = path.read_bytes() + b"\0"
    path.write_bytes(data[: len(data) - 1 + size])
    with pytest.raises(AdapterFilesRefused, match=f"{WEIGHTS}.* {says}"):
        adapter_files.read(path.parent, 8)
