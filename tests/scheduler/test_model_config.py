"""Configurations of models that cannot be served: refused by the sentence of their kind, before a worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.engine_harness import ENVIRONMENT
from support.processes import WITHOUT_TORCH
from support.time_limits import PATIENCE_SECONDS

from lineclear.exit_codes import ExitCode
from lineclear.model_files import config_check
from lineclear.model_files.model_directory import NotServable, check, check_tokenizer

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
HEADER = b"\2\0\0\0\0\0\0\0{}"
"""A safetensors file without tensors."""


def quantized(method: str, **more: Any) -> dict[str, Any]:
    return LLAMA | {"quantization_config": {"quant_method": method, **more}}


def remote(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": ["MyModel"], "auto_map": {"AutoConfig": "mine.MyConfig"}}


CONFIGS: dict[str, tuple[dict[str, Any] | bytes, list[str]]] = {
    "empty file": (b"", ["config.json that is not JSON", "download it again"]),
    "cut short": (b'{"model_type": "llama", ', ["config.json that is not JSON"]),
    "a list": (b"[]", ["not a JSON object"]),
    "too deep": (b"[" * 100_000, ["is nested too deeply"]),
    "no type": ({"architectures": ["LlamaForCausalLM"]}, ["has no model_type"]),
    "t5": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        ["is an encoder-decoder model (T5ForConditionalGeneration)", "...ForCausalLM"],
    ),
    "t5 without the flag": ({"model_type": "t5"}, ["is an encoder-decoder model (t5)"]),
    "speech": ({"model_type": "whisper", "is_encoder_decoder": True}, ["is an encoder-decoder model (whisper)"]),
    "encoder": ({"model_type": "bert", "architectures": ["BertModel"]}, ["is an encoder (BertModel)", "makes no text"]),
    "image classifier": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        ["is a model for images, audio or video (ViTForImageClassification)"],
    ),
    "speech and text": (
        {"model_type": "csm", "architectures": ["CsmForConditionalGeneration"], "audio_config": {}},
        ["is a model for images, audio or video (CsmForConditionalGeneration)"],
    ),
    "time series": (
        {"model_type": "informer", "architectures": ["InformerForPrediction"]},
        ["is of the type informer (InformerForPrediction)", "makes no text"],
    ),
    "unknown type": ({"model_type": "hyperion9"}, ["model_type hyperion9, which transformers", "install a newer one"]),
    "misspelt type": ({"model_type": "quen2"}, ["model_type quen2, which transformers", "is it qwen2?"]),
    "code of its own": (remote("mine"), ["needs code of its own (auto_map in config.json)", "is never run"]),
    "positions in the mask": ({"model_type": "bloom"}, ["is of the type bloom, which has ALiBi"]),
    "indexed layers": (
        {"model_type": "dots3_note", "layer_types": ["indexed_attention", "full_attention"]},
        ["has layers of type indexed_attention, which are not supported"],
    ),
    "gptq": (quantized("gptq", bits=3), ["is quantized (GPTQ, 3 bits)", "neither 4 nor 8", "-- --quantization int8"]),
    "gptq of a third form": (quantized("gptq", bits=4, checkpoint_format="marlin"), ["checkpoint_format marlin"]),
    "awq": (quantized("awq", bits=4, version="gemv_fast"), ["is of the version gemv_fast, not gemm or gemv"]),
    "awq of 3 bits": (quantized("awq", w_bit=3), ["has codes of 3 bits, not 4"]),
    "fp8": (quantized("fp8", weight_block_size=[128]), ["is quantized (FP8)", "lacks what its method needs"]),
    "hqq": (quantized("hqq"), ["is quantized (HQQ)", "a format that lineclear does not read", "or one in GPTQ, AWQ"]),
    "compressed-tensors": (quantized("compressed-tensors"), ["is quantized (compressed-tensors)", "lacks what"]),
    "nvfp4": (
        quantized(
            "compressed-tensors",
            format="nvfp4-pack-quantized",
            config_groups={"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
        ),
        ["is of the format nvfp4-pack-quantized with weights of 4 bits (float)"],
    ),
    "sparse": (
        quantized("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}, config_groups={}),
        ["is sparse, too"],
    ),
    "quantization of another form": (LLAMA | {"quantization_config": [4]}, ["that is not a JSON object"]),
    "bitsandbytes": (
        LLAMA | {"quantization_config": {"load_in_4bit": True}},
        ["is quantized (bitsandbytes, 4 bits)", "a table of fractions", "the checkpoint that it was made from"],
    ),
    "unnamed quantization": (LLAMA | {"quantization_config": {"x": 1}}, ["is quantized (an unnamed method)"]),
}


def saved(directory: Path, config: dict[str, Any] | bytes, weights: bytes = HEADER) -> Path:
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    (directory / "config.json").write_bytes(content)
    (directory / "model.safetensors").write_bytes(weights)
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_sentence_names_the_kind_and_a_remedy(name: str, tmp_path: Path) -> None:
    config, says = CONFIGS[name]
    with pytest.raises(NotServable) as caught:
        check("NAME", saved(tmp_path, config))
    sentence = str(caught.value)
    assert sentence.startswith("--model NAME ")
    for fragment in says:
        assert fragment in sentence


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (b"", "model.safetensors has 0 bytes"),
        (HEADER[:-1], "it is cut short"),
        (b"\2\0\0\0\0\0\0\0[]", "a header that is no object"),
    ],
)
def test_broken_weights_are_refused_by_name(weights: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(NotServable, match=f"cannot be loaded: .*{says}"):
        check("NAME", saved(tmp_path, LLAMA, weights))


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "llama"},
        {"model_type": "nemotron", "architectures": ["NemotronForCausalLM"]},  # not verified: a warning of the worker
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
        {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}},
        {"model_type": "voxtral", "audio_config": {}, "text_config": {"model_type": "llama"}},
        {"model_type": "llama4_text", "layer_types": ["chunked_attention", "full_attention"]},
        {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        LLAMA | {"auto_map": {"AutoConfig": "mine.MyConfig"}},  # code that is not needed
        LLAMA | {"layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "gpt-sw3"},
    ],
)
def test_plausible_models_are_not_refused(config: dict[str, Any], tmp_path: Path) -> None:
    check("NAME", saved(tmp_path, config))


def test_types_of_a_worker_elsewhere_are_not_judged(tmp_path: Path) -> None:
    """Its transformers may be another."""
    directory = saved(tmp_path, {"model_type": "hyperion9"}, b"")
    check("NAME", directory, is_loaded_here=False)


def test_tables_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import configuration_auto, modeling_auto

    known = config_check.installed_types()
    assert known is not None
    assert set(CONFIG_MAPPING) <= known.all
    type_of = {config_class: kind for kind, config_class in configuration_auto.CONFIG_MAPPING_NAMES.items()}
    loaded = {
        kind
        for kind, config_class in configuration_auto.CONFIG_MAPPING_NAMES.items()
        if type_of[config_class] in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    assert loaded == known.causal & set(CONFIG_MAPPING)
    assert known.image_text == set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert known.sequence_to_sequence >= set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert known.media >= set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


@pytest.mark.parametrize("file", ["tokenizer.model", "vocab.json", ""])
def test_tokenizer_of_another_form_is_refused_with_what_converts_it(file: str, tmp_path: Path) -> None:
    directory = saved(tmp_path, LLAMA)
    (directory / (file or "other")).write_text("")
    with pytest.raises(NotServable) as caught:
        check_tokenizer("NAME", directory)
    sentence = str(caught.value)
    assert sentence.startswith(f"--model NAME has {f'its tokenizer as {file}' if file else 'no tokenizer.json'}")
    assert (f"AutoTokenizer.from_pretrained('{directory}')" in sentence) == bool(file)
    (directory / "tokenizer.json").write_text("{}")
    check_tokenizer("NAME", directory)


def test_serve_starts_no_worker(tmp_path: Path) -> None:
    path = str(saved(tmp_path, CONFIGS["gptq"][0]))
    model = ["--demo", "--speculative-method", "draft_model", "--draft-model", path]
    done = subprocess.run(
        [sys.executable, "-m", "lineclear.cli", "serve", "--listen", "127.0.0.1:0", "--log-format", "json", *model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == ExitCode.CONFIGURATION
    assert [line["event"] for line in lines] == ["settings", "configuration_error"]
    assert lines[-1]["problem"].startswith(f"--draft-model {path} is quantized (GPTQ, 3 bits)")


def test_worker_refuses_before_it_imports_torch(tmp_path: Path) -> None:
    for name in ("served", "t5"):
        (tmp_path / name).mkdir()
    served, t5 = saved(tmp_path / "served", LLAMA), saved(tmp_path / "t5", CONFIGS["t5"][0])
    flags = ["--model", str(served), "--draft-model", str(t5), "--socket-directory", str(tmp_path)]
    code = WITHOUT_TORCH + "from lineclear.worker.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *flags, "--log-format", "json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=ENVIRONMENT,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == ExitCode.CONFIGURATION
    assert [line["event"] for line in lines] == ["model_refused"]
    assert lines[0]["reason"].startswith(f"--draft-model {t5} is an encoder-decoder model")
