"""Damaged or incomplete weight files are refused by name; other files are never opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.engine_harness import ENVIRONMENT
from support.families import tiny_model
from support.time_limits import PATIENCE_SECONDS

from lineclear.model_files.safetensors_check import CheckpointBroken, check_weights

INDEX = "model.safetensors.index.json"


def whole(directory: Path) -> Path:
    """A file of three tensors, one of them empty."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int8), "none": torch.zeros(0, 5)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory / "model.safetensors"


def sharded(directory: Path) -> Path:
    save_file({"a": torch.ones(3)}, directory / "one.safetensors")
    save_file({"b": torch.ones(5), "c": torch.ones(1)}, directory / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    return directory / INDEX


def problem(directory: Path) -> str:
    with pytest.raises(CheckpointBroken) as caught:
        check_weights(directory)
    return str(caught.value)


def parts(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(file: Path, header: Any, body: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def test_complete_files_pass(tmp_path: Path) -> None:
    whole(tmp_path)
    check_weights(tmp_path)


def test_complete_shards_pass_and_other_files_are_ignored(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"rubbish")
    check_weights(tmp_path)


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    file = whole(tmp_path)
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        assert "model.safetensors" in problem(tmp_path)


EDITS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("overlap", lambda h: h["b"].update(data_offsets=[20, 24]), "overlap"),
    ("gap", lambda h: h["b"].update(data_offsets=[25, 29]), "leave a gap"),
    ("late start", lambda h: [h["a"].update(data_offsets=[1, 25]), h["b"].update(data_offsets=[25, 29])], "1 bytes"),
    ("past the end", lambda h: h["b"].update(data_offsets=[24, 32], shape=[8]), "cut short by 4 bytes"),
    ("bytes left over", lambda h: h["b"].update(data_offsets=[24, 26], shape=[2]), "2 bytes after"),
    ("wrong shape", lambda h: h["a"].update(shape=[2, 4]), "another number of bytes"),
    ("huge shape", lambda h: h["a"].update(shape=[2**62, 2**62]), "another number of bytes"),
    ("endless shape", lambda h: h["a"].update(shape=[2**62] * 200_000), "no proper shape"),
    ("wrong format", lambda h: h["a"].update(dtype="F16"), "another number of bytes"),
    ("unknown format", lambda h: h["a"].update(dtype="OBJECT"), "unknown number format"),
    ("negative", lambda h: h["a"].update(data_offsets=[-24, 0]), "no proper shape"),
    ("backwards", lambda h: h["a"].update(data_offsets=[24, 0]), "another number of bytes"),
    ("float", lambda h: h["a"].update(shape=[2.0, 3]), "no proper shape"),
    ("true", lambda h: h["a"].update(shape=[True, 6]), "no proper shape"),
    ("three offsets", lambda h: h["a"].update(data_offsets=[0, 24, 24]), "no proper shape"),
    ("no offsets", lambda h: h["a"].pop("data_offsets"), "no proper shape"),
    ("no object", lambda h: h.update(a=[]), "no object"),
]


@pytest.mark.parametrize(("edit", "says"), [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_wrong_header_is_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], Any], says: str) -> None:
    file = whole(tmp_path)
    header, body = parts(file)
    edit(header)
    write(file, header, body)
    assert says in problem(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "no object"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{}}', "two tensors of one name"),
    ],
)
def test_invalid_header_is_refused(tmp_path: Path, header: bytes, says: str) -> None:
    write(tmp_path / "model.safetensors", header, b"\0")
    assert says in problem(tmp_path)


def test_oversized_header_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((200_000_000).to_bytes(8, "little"))
    os.truncate(file, 300_000_000)  # sparse
    assert "more than 100000000" in problem(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_headers_raise_only_checkpoint_broken(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("x")
    raw = bytearray(whole(directory).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (directory / "model.safetensors").write_bytes(raw)
    try:
        check_weights(directory)
    except CheckpointBroken:
        pass
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: (d / "two.safetensors").unlink(), "two.safetensors is missing, 2 tensors"),
        (lambda d: shutil.copy(d / "one.safetensors", d / "two.safetensors"), "two.safetensors lacks 2 tensors"),
        (lambda d: (d / INDEX).write_text("{"), "not JSON"),
        (lambda d: (d / INDEX).write_text("[" * 100_000), "not JSON"),
        (lambda d: (d / INDEX).write_text("{}"), "no weight_map"),
        (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}'), "no *.safetensors beside it"),
        (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "x.bin"}}'), "no *.safetensors beside it"),
        (lambda d: (d / INDEX).unlink(), "neither model.safetensors nor"),
    ],
)
def test_wrong_index_is_refused(tmp_path: Path, change: Callable[[Path], Any], says: str) -> None:
    sharded(tmp_path)
    change(tmp_path)
    assert says in problem(tmp_path)


TRAP = "import pathlib; pathlib.Path({marker!r}).write_text('this ran')\n"


class Trap:
    """Unpickling one writes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (TRAP.format(marker=str(self.marker)),))


def test_code_and_pickles_in_a_model_directory_never_run(tmp_path: Path) -> None:
    """A model that needs none of it, beside every file that some loader somewhere would run. Loaded whole, from its
    own directory as the current one."""
    import pickle

    marker, model = tmp_path / "marker", tmp_path / "model"
    code = {
        "AutoConfig": "configuration_x.X",
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": "tokenization_x.X",
    }
    tiny_model("llama").save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": code, "tokenizer_class": "X"}))
    for name in ("configuration_x", "modeling_x", "tokenization_x", "torch", "sitecustomize", "conftest", "__init__"):
        (model / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    data = pickle.dumps(Trap(marker))
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt", "model.pkl", "scheduler.ckpt"):
        (model / name).write_bytes(data)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "pytorch_model.bin"}}))
    # The trap works: it runs code when opened.
    subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.loads({data!r})"], check=True, timeout=PATIENCE_SECONDS
    )
    assert marker.read_text() == "this ran"
    marker.unlink()
    program = (
        "from lineclear.worker.settings import WorkerSettings\n"
        "from lineclear.worker.runner.runner_factory import make_runner\n"
        "make_runner(WorkerSettings(model='.', socket_directory='/nowhere', device='cpu', num_blocks=64))\n"
    )
    # -P, as the scheduler starts its worker: the current directory is not on the path.
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=model, env=ENVIRONMENT, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0
    assert not marker.exists()
