"""Fingerprints of model files: equal for copies, another for every file that changes an answer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.sources import REPOSITORY

from lineclear.model_files.fingerprint import prompt_digest, stamps, text_fingerprint, weights_fingerprint

DEMO = REPOSITORY / "demo" / "model"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "another name"))


def both(directory: Path) -> tuple[str, str]:
    return weights_fingerprint(directory), text_fingerprint(directory)


def test_a_copy_has_the_same_fingerprints(copy: Path) -> None:
    (copy / "README.md").unlink()
    assert both(copy) == both(DEMO)


def test_other_weights_change_the_weights_stamp_only() -> None:
    weights, text = both(REPOSITORY / "demo" / "model-tiny")
    assert weights != weights_fingerprint(DEMO)
    assert text == text_fingerprint(DEMO)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_files_of_the_text_count(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data + b" ")
    changed = text_fingerprint(copy)
    assert changed != text_fingerprint(DEMO)
    if name == "chat_template.jinja":
        (copy / name).unlink()
        assert text_fingerprint(copy) not in (changed, text_fingerprint(DEMO))
    assert weights_fingerprint(copy) == weights_fingerprint(DEMO)


def test_config_json_counts(copy: Path) -> None:
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert weights_fingerprint(copy) != weights_fingerprint(DEMO)


def test_one_retrained_tensor_of_the_same_size_is_seen(copy: Path) -> None:
    """Every tensor is sampled: no matter which of them changes."""
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    seen = {weights_fingerprint(copy)}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (begin + offset for offset in entry["data_offsets"])
            changed = bytearray(data)
            changed[start:end] = bytes(byte ^ 1 for byte in data[start:end])
            path.write_bytes(changed)
            seen.add(weights_fingerprint(copy))
    assert len(seen) == len(header) - ("__metadata__" in header) + 1


def test_shards_count_as_the_index_names_them(copy: Path) -> None:
    single = copy / "model.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    single.rename(copy / "x.safetensors")
    one = weights_fingerprint(copy)
    (copy / "consolidated.safetensors").write_bytes(b"not loaded")
    assert weights_fingerprint(copy) == one
    (copy / "x.safetensors").write_bytes(b"\0" * 100)
    assert weights_fingerprint(copy) != one


def test_a_file_that_is_replaced_shows_in_the_stamps(copy: Path) -> None:
    before = stamps(copy)
    for name in ("model.safetensors", "tokenizer.json"):
        os.utime(copy / name)
        assert stamps(copy) != before
        before = stamps(copy)
    (copy / "chat_template.jinja").unlink()
    assert stamps(copy) != before


def test_moved_file_has_the_same_stamp(copy: Path) -> None:
    before = stamps(copy)
    for path in copy.iterdir():
        shutil.copy2(path, copy / "aside")
        (copy / "aside").rename(path)
    assert stamps(copy) == before


def test_prompts_of_other_tokens_have_other_digests() -> None:
    prompts = [(1,), (1, 2), (2, 1), (258,), (1, 1), (2**31 - 1,)]
    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
    assert prompt_digest((1, 2)) == prompt_digest([1, 2])
