"""Invalid values of --model: a sentence with the finding and the remedy, and exit code 78."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.time_limits import PATIENCE_SECONDS
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lineclear.exit_codes import ExitCode
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import load

SERVE = [sys.executable, "-m", "lineclear.cli", "serve", "--listen", "127.0.0.1:0", "--log-format", "json", "--model"]
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


def gguf(path: Path) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    return path


def gguf_file(folder: Path) -> Path:
    return gguf(folder / "model-q4_k_m.gguf")


def gguf_file_of_another_name(folder: Path) -> Path:
    return gguf(folder / "model")


def gguf_folder(folder: Path) -> Path:
    gguf(folder / "model-q4_k_m.gguf")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder


def weights_file(folder: Path) -> Path:
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def pickles(folder: Path) -> Path:
    LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    return folder


def tokenizer_alone(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def lora(folder: Path) -> Path:
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/base-7b", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"lora_A": torch.zeros(1)}, folder / "adapter_model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def bert(folder: Path) -> Path:
    BertForMaskedLM(BertConfig(**TINY, max_position_embeddings=32)).save_pretrained(folder)
    return folder


def sentence_encoder(folder: Path) -> Path:
    BertForMaskedLM(BertConfig(**TINY, max_position_embeddings=32)).bert.save_pretrained(folder)
    return folder


def pointers(folder: Path) -> Path:
    LlamaConfig(**TINY).save_pretrained(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    return folder


def checkpoints(folder: Path) -> Path:
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500/config.json").write_text("{}")
    return folder


def cache_folder(folder: Path) -> Path:
    for name in ("blobs", "refs", "snapshots/0123abcd"):
        (folder / name).mkdir(parents=True)
    return folder


def pipeline(folder: Path) -> Path:
    (folder / "model_index.json").write_text("{}")
    return folder


def nothing(folder: Path) -> Path:
    return folder


MISTAKES: list[tuple[Callable[[Path], Path], list[str]]] = [
    (gguf_file, ["is a GGUF file", "config.json, tokenizer.json and *.safetensors", "hf download"]),
    (gguf_file_of_another_name, ["is a GGUF file"]),
    (gguf_folder, ["holds GGUF weights (model-q4_k_m.gguf)", "*.safetensors", "hf download"]),
    (weights_file, ["is a file of weights", "give its directory"]),
    (pickles, ["pytorch_model.bin", "safetensors", "save_pretrained"]),
    (tokenizer_alone, ["holds a tokenizer and no model", "config.json and *.safetensors"]),
    (lora, ["is a LoRA adapter for org/base-7b", "--model org/base-7b --lora-modules NAME=", "merge_and_unload"]),
    (bert, ["is an encoder (BertForMaskedLM)", "makes no text"]),
    (sentence_encoder, ["is an encoder (BertModel)", "makes no text"]),
    (pointers, ["pointer of Git LFS", "git lfs pull"]),
    (checkpoints, ["checkpoint-500"]),
    (cache_folder, ["snapshots"]),
    (pipeline, ["diffusers"]),
    (nothing, ["is empty", "*.safetensors"]),
]
IDS = [make.__name__ for make, _ in MISTAKES]


USUAL = [case for case in MISTAKES if case[0] in (gguf_file, gguf_folder, pickles, tokenizer_alone, lora, bert)]


@pytest.mark.parametrize(("make", "says"), USUAL, ids=[make.__name__ for make, _ in USUAL])
def test_serve_rejects_a_bad_model_clearly(make: Callable[[Path], Path], says: list[str], tmp_path: Path) -> None:
    path = str(make(tmp_path))
    done = subprocess.run([*SERVE, path], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    lines = [json.loads(line) for line in done.stderr.splitlines()]  # fails on a library's line, which is no JSON
    assert done.returncode == ExitCode.CONFIGURATION
    assert [line["event"] for line in lines] == ["settings", "configuration_error"]
    assert lines[-1]["problem"].startswith(f"--model {path} ")
    for fragment in says:
        assert fragment in lines[-1]["problem"]


@pytest.mark.parametrize(("make", "says"), MISTAKES, ids=IDS)
def test_worker_rejects_it_in_the_same_sentence(
    make: Callable[[Path], Path], says: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(make(tmp_path))
    capfd.readouterr()
    with pytest.raises(ModelRefused) as caught:
        load(path, torch.device("cpu"), None)
    assert str(caught.value).startswith(f"--model {path} ")
    for fragment in says:
        assert fragment in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("model", ["nobody/nothing", "/absent"])
def test_missing_model_is_rejected(model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*SERVE, model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "HF_HOME": str(tmp_path)},
    )
    problem = json.loads(done.stderr.splitlines()[-1])["problem"]
    assert done.returncode == ExitCode.CONFIGURATION
    assert problem.startswith(f"--model {model} ")
    assert (f"hf download {model}" in problem) == (model == "nobody/nothing")


def test_library_output_does_not_break_log_lines(tmp_path: Path) -> None:
    """transformers prints a table when weights are missing."""
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if "down_proj" not in k})
    flags = ["--model", str(tmp_path), "--socket-directory", str(tmp_path), "--log-format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "lineclear.worker.main", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == ExitCode.CONFIGURATION
    assert lines[-1]["event"] == "model_refused"
    assert "down_proj" in lines[-1]["reason"]
    assert done.stdout == ""


def test_error_names_the_environment_variable(tmp_path: Path) -> None:
    path = str(gguf_file(tmp_path))
    done = subprocess.run(
        [*SERVE[:-1]],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "LINECLEAR_MODEL": path},
    )
    assert json.loads(done.stderr.splitlines()[-1])["problem"].startswith(f"LINECLEAR_MODEL {path} is a GGUF file")
