"""`lineclear quantize`: directories that answer as `--quantization` while loading, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client.command import COMMAND, run, spawn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.families import WIDE, tiny_model
from support.kernel_variants import needs_kernels
from support.quantized_checkpoints import FORMATS, edit, write
from support.service import DEMO_MODEL as MODEL
from support.time_limits import PATIENCE_SECONDS
from torch import Tensor

from lineclear.worker import quantize_command
from lineclear.worker.cpu.quantized_linear import INT4_GROUP
from lineclear.worker.model import quantized_directory
from lineclear.worker.model.compatibility_probe import paged_logits
from lineclear.worker.model.loader import build_fused, load, to_quantized
from lineclear.worker.quantization import grouped_weight
from lineclear.worker.quantization.grouped_weight import quantize

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},  # biases
    "phi3": {"intermediate_size": 80},  # merged matrices, and groups of two sizes
    "granite": {"tie_word_embeddings": True},
    "qwen3": {},
    "olmo2": {},
    "gemma2": {"tie_word_embeddings": True},  # scaled embeddings
    "starcoder2": {},  # biases and layer norms
}


def logits(directory: Path, form: str = "") -> Tensor:
    """Return those of the fused forward pass in bfloat16."""
    loaded = load(str(directory), CPU, torch.bfloat16)
    found = to_quantized(loaded, form) if form else build_fused(loaded)
    assert found is not None
    assert found.decoder is not None
    with torch.inference_mode():
        return paged_logits(found)


def saved(directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    tiny_model(family, dtype=dtype, **{**WIDE, **changes}).save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def refusal(capsys: pytest.CaptureFixture[str], model: Path | str, out: Path, *flags: str) -> str:
    """Return the sentence with which the command refuses. Nothing is left then."""
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else None
    capsys.readouterr()
    assert quantize_command.main([str(model), str(out), *(flags or ("--bits", "4"))]) == 2
    if before is not None:
        assert sorted(out.parent.iterdir()) == before
    text = capsys.readouterr().err
    assert text.startswith("lineclear quantize: ")
    assert len(text.splitlines()) == 1
    return text


@needs_kernels
def test_the_command_writes_what_quantization_makes_while_loading(tmp_path: Path) -> None:
    out = tmp_path / "small"
    done = run([*COMMAND, "quantize", str(MODEL), str(out), "--bits", "4"])
    assert (done.returncode, done.stderr) == (0, "")
    assert 0.9 < float(done.stdout.split()[1]) * 1e6 / (out / "model.safetensors").stat().st_size < 1.1
    assert torch.equal(logits(out), logits(MODEL, "int4"))
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    names = {path.name for path in MODEL.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (out / name).read_bytes() == (MODEL / name).read_bytes()


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_families_in_several_files(family: str, bits: int, tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model", family, **FAMILIES[family]), tmp_path / "out"
    assert quantize_command.main([str(model), str(out), "--bits", str(bits)]) == 0
    assert torch.equal(logits(out), logits(model, f"int{bits}"))
    assert load(str(out), CPU, None).dtype is torch.bfloat16
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())


def test_matrices_are_those_of_the_format(tmp_path: Path) -> None:
    """Decoded by the rules of compressed-tensors, with arithmetic of the test's own."""
    model, out = saved(tmp_path / "model", dtype=torch.float32, tie_word_embeddings=True), tmp_path / "out"
    assert quantize_command.main([str(model), str(out), "--bits", "4", "--group-size", "32"]) == 0
    whole = {name: t for path in model.glob("*.safetensors") for name, t in load_file(path).items()}
    found = {name: t for path in out.glob("*.safetensors") for name, t in load_file(path).items()}
    modules = {name.removesuffix(".weight_packed") for name in found if name.endswith(".weight_packed")}
    assert modules == {name.removesuffix(".weight") for name in whole if "_proj" in name} | {"lm_head"}
    for module in modules:
        bits = 8 if module == "lm_head" else 4
        source = whole.get(f"{module}.weight", whole["model.embed_tokens.weight"]).bfloat16()
        shape = found[f"{module}.weight_shape"].tolist()
        words, scale = found[f"{module}.weight_packed"].numpy().view(np.uint32), found[f"{module}.weight_scale"]
        codes = np.stack([words >> shift & 2**bits - 1 for shift in range(0, 32, bits)], -1).reshape(shape)
        zero = np.full(scale.shape, 128)
        if bits == 4:
            packed = found[f"{module}.weight_zero_point"].numpy().view(np.uint32)
            zero = np.stack([packed >> shift & 15 for shift in range(0, 32, 4)], 1).reshape(-1, packed.shape[1])
            zero = zero[: shape[0]]
        group = shape[1] // scale.shape[1]
        matrix = (codes.astype(int) - zero.repeat(group, 1)) * scale.double().numpy().repeat(group, 1)
        expected = quantize(source, bits, 32 if bits == 4 else shape[1]).dequantized()
        assert scale.dtype is torch.bfloat16
        assert np.array_equal(matrix, expected.numpy())
        assert (torch.from_numpy(matrix) - source.double()).norm() < 0.2 * source.double().norm()
    kept = {name: t for name, t in found.items() if name in whole}
    assert kept.keys() == whole.keys() - {f"{module}.weight" for module in modules}
    assert all(torch.equal(t, whole[name].bfloat16()) for name, t in kept.items())


def test_the_configuration_says_what_is_quantized(tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model", intermediate_size=80, tie_word_embeddings=True), tmp_path / "out"
    assert quantize_command.main([str(model), str(out), "--bits", "4"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["dtype"]) == (False, "bfloat16")
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "pack-quantized")
    groups = {
        tuple(group["targets"]): tuple(group["weights"].get(key) for key in ("num_bits", "strategy", "group_size"))
        for group in quantization["config_groups"].values()
    }
    down = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))
    assert groups == {("Linear",): (4, "group", 64), down: (4, "group", 16), ("lm_head",): (8, "channel", None)}
    eight = tmp_path / "eight"
    assert quantize_command.main([str(model), str(eight), "--bits", "8"]) == 0
    groups = json.loads((eight / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear", "lm_head"]]


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """Odd sizes of 2 bytes must not shift those of 4 and 8 bytes."""
    model, out = saved(tmp_path / "model", vocab_size=253), tmp_path / "out"
    assert quantize_command.main([str(model), str(out), "--bits", "4", "--group-size", "128"]) == 0
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(name).data_ptr() % file.get_tensor(name).itemsize == 0 for name in file.keys())  # noqa: SIM118


def test_matrices_are_quantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
    whole = [quantize(weight, 4, 32), quantize(weight, 8, 64)]
    monkeypatch.setattr(grouped_weight, "_PIECE_ELEMENTS", 64 * 16)
    for one, bits, group in zip(whole, (4, 8), (32, 64), strict=True):
        other = quantize(weight, bits, group)
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.dequantized(), other.dequantized())


def test_default_groups_are_those_of_int4() -> None:
    assert quantize_command._GROUP_SIZE == INT4_GROUP


def test_an_existing_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (tmp_path / "folder", tmp_path / "link"):
        _ = out.mkdir() if out.name == "folder" else out.symlink_to("nowhere")
        assert f"OUT {out} exists; give another directory, or remove it" in refusal(capsys, MODEL, out)
    missing = tmp_path / "a" / "b"
    assert f"OUT {missing}: there is no directory {missing.parent}" in refusal(capsys, MODEL, missing)


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert f"MODEL {out} does not exist" in refusal(capsys, out, out)
    quantized = write(tmp_path / "gptq", FORMATS["gptq4-sym-v1"], "llama")
    assert "is quantized already; give the checkpoint that it was made from" in refusal(capsys, quantized, out)
    for family in ("mixtral", "gpt2"):
        model = tmp_path / family
        tiny_model(family).save_pretrained(model)
        assert f"the type {family} cannot be quantized; docs/supported.md lists" in refusal(capsys, model, out)
    lacking = saved(tmp_path / "lacking")
    edit(lacking / "config.json", num_hidden_layers=3)
    sentence = "its files lack 7 matrices that its config.json asks for, as model.layers.2."
    assert sentence in refusal(capsys, lacking, out)


def test_a_gguf_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, "llama")
    assert "is a GGUF file; give the directory with safetensors" in refusal(capsys, path, tmp_path / "out")


def test_tensors_of_another_kind_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", dtype=torch.bfloat16, **WIDE).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int32)}, file)
    sentence = refusal(capsys, tmp_path / "model", tmp_path / "out")
    assert "its tensor model.norm.weight is I32 [64], which cannot be quantized" in sentence


def test_too_little_disk_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = saved(tmp_path / "model"), tmp_path / "out"
    assert quantize_command.main([str(model), str(out), "--bits", "4"]) == 0
    written = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=written // 2))
    assert f"it would take 0 MiB, and {tmp_path} has 0 MiB free" in refusal(capsys, model, out)


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = saved(tmp_path / "model"), tmp_path / "out"
    before, written = quantized_directory._write_shard, []

    def fails(shard: Any, target: Path, matrices: Any) -> None:
        before(shard, target, matrices)
        written.append(target)
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(quantized_directory, "_write_shard", fails)
    assert "No space left on device" in refusal(capsys, model, out)


def test_a_target_that_appears_meanwhile_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = saved(tmp_path / "model"), tmp_path / "out"
    before = quantized_directory._config

    def meanwhile(*arguments: Any) -> Any:
        out.mkdir()
        (out / "mine").touch()
        return before(*arguments)

    monkeypatch.setattr(quantized_directory, "_config", meanwhile)
    assert quantize_command.main([str(model), str(out), "--bits", "8"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model", num_hidden_layers=40, intermediate_size=4096), tmp_path / "out"
    command = spawn("quantize", str(model), str(out), "--bits", "4")
    while not any(path.name.startswith(".out.") for path in tmp_path.iterdir()):
        assert command.poll() is None
    command.send_signal(signum)
    _, err = command.communicate(timeout=PATIENCE_SECONDS)
    assert (command.returncode, err) == (130, b"lineclear quantize: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_wrong_usage(tmp_path: Path) -> None:
    for words in ([], [str(MODEL), str(tmp_path / "out")], [str(MODEL), str(tmp_path / "out"), "--bits", "5"]):
        with pytest.raises(SystemExit) as caught:
            quantize_command.main(words)
        assert caught.value.code == 2


def test_the_client_alone_says_what_is_missing(tmp_path: Path) -> None:
    """Without the packages of a server."""
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("from lineclear.client import local_server\nlocal_server.missing = lambda: ['torch']\n")
    command = [*COMMAND, "quantize", "a", "b", "--bits", "4"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 78
    assert "torch is not installed" in done.stderr
