"""Quantized checkpoints answer as their dequantized models, stay quantized in memory, and are refused if damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from fuzz import model_files
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from support.families import WIDE
from support.kernel_variants import modules_reason, needs_kernels
from support.quantized_checkpoints import FORMATS, edit, write

from lineclear.worker.model.compatibility_probe import eager_logits, paged_logits, relative_error, weight_bytes
from lineclear.worker.model.loaded_model import LoadedModel, ModelRefused
from lineclear.worker.model.loader import build_fused, load, to_quantized
from lineclear.worker.quantization import grouped_weight, modules
from lineclear.worker.quantization.modules import QuantizedExperts, QuantizedLinear
from lineclear.worker.runner import self_test
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

CPU = torch.device("cpu")
CASES = [
    *((name, "llama") for name in FORMATS if name != "mxfp4"),
    *((name, "qwen3") for name in ("gptq4-asym-v1-act", "awq-gemm", "packed4-asym-group", "fp8-block")),
    *((name, "qwen2") for name in ("gptq4-sym-v1", "awq-gemm", "packed4-sym-group", "w8a8")),
    *(
        (name, "gemma3_text")
        for name in ("gptq4-sym-v1", "awq-gemm", "packed4-sym-group-act", "ct-fp8", "bitsandbytes")
    ),
    *((name, "mixtral") for name in ("gptq4-sym-v1", "awq-gemm", "fp8-block")),
    *((name, "qwen3_moe") for name in ("gptq4-asym-v1-act", "packed4-sym-group", "fp8-tensor")),
    ("mxfp4", "gpt_oss"),
    ("fp8-block", "deepseek_v3"),
]
FITTING = {"deepseek_v3": {"qk_rope_head_dim": 16, "num_key_value_heads": 4}}
"""Sizes that fit to those of `WIDE`."""


def quantized(directory: Path, dtype: torch.dtype | None = torch.float32) -> LoadedModel:
    return load(str(directory), CPU, dtype)


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The dequantized model, by transformers alone."""
    return tf.AutoModelForCausalLM.from_pretrained(directory.parent / "plain", dtype=dtype).eval()


def refusal(directory: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        quantized(directory)
    return str(caught.value)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_answers_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS[name], family, **FITTING.get(family, {}))
    loaded = quantized(directory)
    assert loaded.weights == FORMATS[name].weights
    answers = self_test.expected_answers(loaded)
    model = reference(directory)
    for answer in answers:
        ids = torch.tensor([answer.prompt])
        own = model.generate(ids, max_new_tokens=len(answer.tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
        assert own[0, len(answer.prompt) :].tolist() == answer.tokens
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=64, block_size=4, num_slots=4, max_step_tokens=64))
    with capture_logs() as lines:
        self_test.check(runner, answers, loaded.dtype)  # packed, in chunks, over KV blocks
    assert lines[0]["sequences"] == 2
    assert loaded.probe_logits is not None
    with torch.inference_mode():
        assert relative_error(loaded.probe_logits, eager_logits(model)) <= 1e-5
    assert loaded.weight_bytes < weight_bytes(model)


@pytest.mark.parametrize("name", ["gptq4-asym-v1-act", "awq-gemm", "fp8-block"])
def test_bfloat16_equals_the_dequantized_model_within_rounding(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS[name], "llama")
    loaded, plain = quantized(directory, torch.bfloat16), load(str(directory.parent / "plain"), CPU, torch.bfloat16)
    assert loaded.dtype is torch.bfloat16
    assert loaded.probe_logits is not None
    assert plain.probe_logits is not None
    assert (loaded.probe_logits - plain.probe_logits).norm() <= 0.02 * plain.probe_logits.norm()


@needs_kernels
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "llama") for name in ("gptq4-asym-v1-act", "awq-gemm", "w8a8")),
        *(("mxfp4", "gpt_oss"), ("gptq4-asym-v1-act", "qwen3_moe"), ("w8a8", "qwen2_moe")),
    ],
)
def test_fused_forward_pass_multiplies_the_stored_matrices(name: str, family: str, tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS[name], family, **WIDE)
    loaded = quantized(directory, torch.bfloat16)
    layer = loaded.model.model.layers[0]
    fused = build_fused(loaded)
    assert fused is not None
    assert fused.decoder is not None
    assert fused.weights == FORMATS[name].weights
    assert layer.self_attn.o_proj.weight.numel() == 0  # it is packed
    assert not hasattr(getattr(layer.mlp, "experts", None), "down_proj")
    with torch.inference_mode():
        assert relative_error(paged_logits(fused), eager_logits(reference(directory))) <= 0.06


def test_float32_keeps_exact_products(tmp_path: Path) -> None:
    loaded = quantized(write(tmp_path, FORMATS["gptq4-sym-v1"], "llama", **WIDE))
    assert modules_reason(build_fused(loaded)) == "float32 asks for exact products of quantized matrices"


@needs_kernels
def test_float8_keeps_its_modules(tmp_path: Path) -> None:
    loaded = quantized(write(tmp_path, FORMATS["fp8-block"], "llama", **WIDE), torch.bfloat16)
    with capture_logs() as lines:
        reason = modules_reason(build_fused(loaded))
    assert [line["problem"] for line in lines] == [reason] == ["no kernel multiplies its quantized matrices"]


def test_matrices_stay_quantized(tmp_path: Path) -> None:
    loaded = quantized(write(tmp_path, FORMATS["gptq4-sym-v1"], "mixtral"))
    layer = loaded.model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, QuantizedLinear)
    assert isinstance(layer.mlp.experts.gate_up_proj, QuantizedExperts)
    assert [len(parts) for parts in layer.mlp.experts.gate_up_proj.weights] == [2] * 4
    assert layer.self_attn.q_proj.weight.bits == 4
    assert type(loaded.model) is tf.MixtralForCausalLM
    assert modules_reason(build_fused(loaded))
    with pytest.raises(ModelRefused, match=r"quantized already \(gptq-4bit\): leave --quantization at none"):
        to_quantized(loaded)


def test_plain_layers_beside_quantized_ones(tmp_path: Path) -> None:
    """The names in `modules_to_not_convert` are plain in the file."""
    form = FORMATS["awq-gemm"]
    form = replace(form, skipped=(*form.skipped, "down_proj"))
    layer = quantized(write(tmp_path, form, "llama")).model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, QuantizedLinear)
    assert isinstance(layer.mlp.down_proj, torch.nn.Linear)


def test_tied_output_layer_shares_quantized_embeddings(tmp_path: Path) -> None:
    form = FORMATS["bitsandbytes"]
    form = replace(form, skipped=tuple(name for name in form.skipped if name != "embed_tokens"))
    directory = write(tmp_path, form, "gemma3_text", tie_word_embeddings=True)
    model = quantized(directory).model
    assert isinstance(model.lm_head, QuantizedLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.tensor([[5, 9, 200, 17]])
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        assert torch.allclose(model(ids).logits, reference(directory)(ids).logits, atol=1e-4)


def test_sharded_files(tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS["gptq4-sym-v1"], "llama")
    whole = quantized(directory).probe_logits
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors, key=lambda name: (name.endswith("scales"), name))  # one matrix lies in several files
    files = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(quantized(directory).probe_logits, whole)


def test_large_matrices_are_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer = QuantizedLinear(grouped_weight.quantize(torch.randn(70, 64), 4, 32), torch.nn.Parameter(torch.randn(70)))
    x, pieces = torch.randn(3, 5, 64), []
    expected = torch.nn.functional.linear(x, layer.weight.dequantized(), layer.bias)
    monkeypatch.setattr(modules, "_PIECE_ELEMENTS", 64 * 16)
    original = grouped_weight.GroupedWeight.dequantized
    monkeypatch.setattr(
        grouped_weight.GroupedWeight,
        "dequantized",
        lambda self, dtype: pieces.append(self.shape) or original(self, dtype),
    )
    assert torch.allclose(layer(x), expected, atol=1e-5)
    assert pieces == [(16, 64)] * 4 + [(6, 64)]


def test_number_format_does_not_change_quantized_weights() -> None:
    layer = QuantizedLinear(grouped_weight.quantize(torch.randn(8, 64), 4, 32), torch.nn.Parameter(torch.randn(8)))
    layer.to(torch.bfloat16)
    assert (layer.weight.scale.dtype, layer.weight.codes.dtype) == (torch.float32, torch.uint8)
    assert layer.bias.dtype is torch.bfloat16


MEASURE = """
import sys, threading, torch
from pathlib import Path
from lineclear.worker.model import loader
def anonymous(): return int(next(x for x in open('/proc/self/status') if x.startswith('RssAnon')).split()[1]) << 10
def read(directory): return loader._read_model(Path(directory), loader._quantized(Path(directory)), torch.float32)
read(sys.argv[1])
stop, most, before = threading.Event(), [0], anonymous()
def watch():
    while not stop.wait(0.001): most[0] = max(most[0], anonymous())
thread = threading.Thread(target=watch); thread.start()
model = read(sys.argv[2])
stop.set(); thread.join()
print(loader.weight_bytes(model), max(most[0], anonymous()) - before)
"""


def test_loading_takes_the_quantized_model_and_little_more(tmp_path: Path) -> None:
    """The dequantized model is eight times as large. Mapped files, which the page cache holds, do not count."""
    small = write(tmp_path / "small", FORMATS["gptq4-sym-v1"], "llama")
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
    large = write(tmp_path / "large", FORMATS["gptq4-sym-v1"], "llama", **sizes)
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    weights, peak = map(int, subprocess.check_output(command, env=os.environ, text=True).split())
    assert weights < 12 << 20
    assert peak <= weights + 1024 * 2048 * 4  # one dequantized matrix


def test_a_divided_model_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS["awq-gemm"], "llama")
    with pytest.raises(ModelRefused, match="leave --tensor-parallel-size at 1"):
        load(str(directory), CPU, None, divided=lambda read, wrap: wrap(read()))


def test_missing_quantized_weights_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS["gptq4-sym-v1"], "llama")
    edit(directory / "config.json", num_hidden_layers=3)
    assert "lacks weights that its config.json asks for: 9, as model.layers.2." in refusal(directory)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS["gptq4-sym-v1"], "llama")
    edit(directory / "config.json", intermediate_size=64)
    assert "the quantized matrix model.layers.0.mlp.down_proj.weight has " in refusal(directory)


def test_quantized_routers_are_refused(tmp_path: Path) -> None:
    form = FORMATS["bitsandbytes"]
    form = replace(form, skipped=("embed_tokens", "lm_head", "norm"))
    sentence = refusal(write(tmp_path, form, "mixtral", num_local_experts=8))
    assert "gate.weight is quantized, and MixtralTopKRouter cannot compute with a quantized weight" in sentence


def test_lost_parts_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path, FORMATS["gptq4-sym-v1"], "llama")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.qzeros"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert "the quantized matrix model.layers.1.mlp.up_proj.weight has no qzeros" in refusal(directory)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_damaged_matrices_are_refused_or_read(name: str) -> None:
    found = model_files.matrices(FORMATS[name], count=60, seed=1)
    assert found["refused"] >= 15
    assert found["read"] >= 1
