"""The language model of a checkpoint for images, audio or video and text: it is read and served without the rest.

The text configuration of such a checkpoint names a type of transformers for text alone, which has the same layers
under other names. What has no such type is loaded whole, and gets no images either.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lineclear.model_files.config_check import TEXT_TYPES
from lineclear.worker.quantization.checkpoint import Checkpoint

NAMES = {r"^language_model\.lm_head": "lm_head", r"^(?:model\.)?language_model\.(?:model\.)?": "model."}
"""Patterns for what checkpoints put before the name of a tensor, and what the type for text alone has there."""


def auto_class(config: Any) -> Any:
    """Return transformers' class that makes models of this configuration."""
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def text_config(config: Any) -> Any | None:
    """Return the configuration of the language model as a type for text alone; None if it is one, or has none."""
    text = config.get_text_config()
    if config.model_type in TEXT_TYPES:
        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = fields.get("rope_parameters") or {}
        fields["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope")}
        text = AutoConfig.for_model(TEXT_TYPES[config.model_type], **fields)
    elif text is config or type(text) not in AutoModelForCausalLM._model_mapping:
        return None
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return text


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its tensors under the names of the type for text alone."""
    plain = {_renamed(name): tensor for name, tensor in checkpoint.plain.items()}
    return replace(checkpoint, plain=plain, matrices={_renamed(x): make for x, make in checkpoint.matrices.items()})


def _renamed(name: str) -> str:
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name
