"""Models for images and text are served for text, as their whole models of transformers answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from e2e.test_families import BLOCK_SIZE, LIMITS, greedy, prompts
from e2e.transformers_answers import generated
from structlog.testing import capture_logs
from support.families import CONTEXT, VOCAB_SIZE, make_distinct, tiny_config
from support.inprocess import InProcess

from lineclear.worker.model import text_backbone
from lineclear.worker.model.loader import load
from lineclear.worker.quantization.checkpoint import Checkpoint
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

CPU = torch.device("cpu")
OPTIONS = RunnerOptions(num_blocks=64, block_size=BLOCK_SIZE, num_slots=4, max_step_tokens=64)
_EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PICTURE = {"image_size": 28, "patch_size": 14}
_IDS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}


def _qwen(kind: type, sections: list[int], **changes: Any) -> Any:
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    }  # fmt: skip
    return kind(text_config=text | changes, vision_config=_EYES, **_IDS)


WRAPPERS: dict[str, tuple[Any, str]] = {
    "gemma3": (
        lambda: tf.Gemma3Config(text_config=tiny_config("gemma3_text"), vision_config=tf.SiglipVisionConfig(**_TOWER)),
        "gemma3_text",
    ),
    "llama4": (
        lambda: tf.Llama4Config(
            text_config=tiny_config("llama4_text"),
            vision_config={**_TOWER, **_PICTURE, "vision_output_dim": 32, "projector_input_dim": 32,
                           "projector_output_dim": 32, "pixel_shuffle_ratio": 1.0},
        ),
        "llama4_text",
    ),
    "mistral3": (
        lambda: tf.Mistral3Config(
            text_config=tiny_config("mistral"), vision_config=tf.PixtralVisionConfig(**_TOWER, **_PICTURE)
        ),
        "mistral",
    ),
    "qwen2_5_vl": (lambda: _qwen(tf.Qwen2_5_VLConfig, [2, 1, 1]), "qwen2"),
    "qwen3_vl": (
        lambda: _qwen(tf.Qwen3VLConfig, [2, 1, 1], head_dim=8) , "qwen3"),
}  # fmt: skip
"""Wrappers and the families that they are served as."""


@pytest.mark.parametrize("kind", WRAPPERS)
def test_answers_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    make, family = WRAPPERS[kind]
    torch.manual_seed(0)
    model = make_distinct(tf.AutoModelForImageTextToText.from_config(make()))
    model.save_pretrained(tmp_path)
    asked = [greedy(f"greedy-{i}", prompt) for i, prompt in enumerate(prompts()[2:4])]
    expected = generated(model, asked, eos_token_id=2)
    with capture_logs() as lines:
        loaded = load(str(tmp_path), CPU, None)
    assert [line["event"] for line in lines] == ["served_for_text_only"]
    assert loaded.family == family
    assert loaded.weight_bytes < sum(x.numel() * x.element_size() for x in model.parameters())
    assert InProcess(ModelRunner(loaded, OPTIONS), LIMITS).serve(asked) == expected


def test_model_without_a_text_type_is_loaded_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = _qwen(
        tf.Qwen3VLMoeConfig, [2, 1, 1], head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    model = make_distinct(tf.AutoModelForImageTextToText.from_config(config))
    model.save_pretrained(tmp_path)
    asked = [greedy("greedy", prompts()[3])]
    loaded = load(str(tmp_path), CPU, None)
    assert InProcess(ModelRunner(loaded, OPTIONS), LIMITS).serve(asked) == generated(model, asked, eos_token_id=2)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_tensors_of_each_layout_get_the_names_of_the_text_type(prefix: str) -> None:
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    names = [f"{prefix}layers.0.mlp.up_proj.weight", head, "vision_tower.layers.0.weight"]
    plain = {name: torch.zeros(1) for name in names}
    found = text_backbone.renamed(Checkpoint("", plain, {f"{prefix}layers.1.mlp.up_proj.weight": lambda _: []}))
    assert list(found.plain) == ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", names[2]]
    assert list(found.matrices) == ["model.layers.1.mlp.up_proj.weight"]
