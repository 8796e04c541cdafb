"""Invalid values of --model: a sentence with the finding and the remedy, and exit code 78."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.time_limits import PATIENCE_SECONDS
from transformers import LlamaConfig, LlamaForCausalLM

from lineclear.exit_codes import ExitCode
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import load

SERVE = [sys.executable, "-m", "lineclear.cli", "serve", "--listen", "127.0.0.1:0", "--log-format", "json"]
LLAMA = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
GGUF = "GGUF\3\0\0\0" + 16 * "\0"
NO_TENSORS = "\2\0\0\0\0\0\0\0{}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
ADAPTER = '{"peft_type": "LORA", "base_model_name_or_path": "org/base-7b", "r": 8}'

MISTAKES: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "GGUF file": ({"m-q4.gguf": GGUF}, "m-q4.gguf", ["has no tokenizer.ggml.tokens", "hf download"]),
    "GGUF file of another name": ({"model": GGUF}, "model", ["has no tokenizer.ggml.tokens"]),
    "GGUF file cut short": (
        {"m-q4.gguf": GGUF[:20]},
        "m-q4.gguf",
        ["cut short within its header", "download it again"],
    ),
    "big-endian GGUF file": ({"m.gguf": "GGUF\0\0\0\3" + 16 * "\0"}, "m.gguf", ["is big-endian"]),
    "GGUF folder": (
        {"m-q4.gguf": GGUF, "m-q8.gguf": GGUF, "config.json": LLAMA},
        "",
        ["holds 2 GGUF files (m-q4.gguf and 1 more); give one of them, as --model", "m-q4.gguf"],
    ),
    "file of weights": (
        {"model.safetensors": NO_TENSORS},
        "model.safetensors",
        ["is a file of weights", "give its directory"],
    ),
    "pickles": (
        {"config.json": LLAMA, "pytorch_model.bin": "PK"},
        "",
        ["pytorch_model.bin", "safetensors", "save_pretrained"],
    ),
    "tokenizer alone": (
        {"tokenizer.json": "{}", "tokenizer_config.json": "{}"},
        "",
        ["holds a tokenizer and no model", "config.json and *.safetensors"],
    ),
    "adapter": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": NO_TENSORS, "tokenizer.json": "{}"},
        "",
        ["is a LoRA adapter for org/base-7b", "--model org/base-7b --lora-modules NAME=", "merge_and_unload"],
    ),
    "pointers": ({"config.json": LLAMA, "model.safetensors": POINTER}, "", ["pointer of Git LFS", "git lfs pull"]),
    "checkpoints": ({"checkpoint-500/config.json": "{}"}, "", ["checkpoint-500"]),
    "folder of the cache": ({"blobs/a": "", "refs/a": "", "snapshots/0123abcd/a": ""}, "", ["snapshots"]),
    "pipeline": ({"model_index.json": "{}"}, "", ["diffusers"]),
    "nothing": ({}, "", ["is empty", "*.safetensors"]),
}
"""Files, the one that is given as the model, and what the sentence says."""


def written(folder: Path, name: str) -> str:
    files, given, _ = MISTAKES[name]
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content.encode("latin-1"))
    return str(folder / given)


@pytest.mark.parametrize("name", ["GGUF file", "pickles"])
def test_serve_rejects_a_bad_model_clearly(name: str, tmp_path: Path) -> None:
    """The sentence names the environment variable if that is what named the model."""
    path = written(tmp_path, name)
    flags, variables = (["--model", path], {}) if name == "pickles" else ([], {"LINECLEAR_MODEL": path})
    done = subprocess.run(
        [*SERVE, *flags], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=os.environ | variables
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]  # fails on a library's line, which is no JSON
    assert done.returncode == ExitCode.CONFIGURATION
    assert [line["event"] for line in lines] == ["settings", "configuration_error"]
    assert lines[-1]["problem"].startswith(f"{'--model' if flags else 'LINECLEAR_MODEL'} {path} ")
    for fragment in MISTAKES[name][2]:
        assert fragment in lines[-1]["problem"]


@pytest.mark.parametrize("name", MISTAKES)
def test_worker_rejects_it_in_the_same_sentence(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, name)
    capfd.readouterr()
    with pytest.raises(ModelRefused) as caught:
        load(path, torch.device("cpu"), None)
    assert str(caught.value).startswith(f"--model {path} ")
    for fragment in MISTAKES[name][2]:
        assert fragment in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("model", ["nobody/nothing", "/absent"])
def test_missing_model_is_rejected(model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*SERVE, "--model", model],
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
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**tiny, vocab_size=32))
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
