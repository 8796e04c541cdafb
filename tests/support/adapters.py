"""LoRA adapters for tests, made and computed by PEFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Any, directory: Path, seed: int, targets: Sequence[str] = ALL_LINEAR, size: float = 0.3, **config: Any
) -> Path:
    """Save an adapter with random factors for `model`, which cannot be used afterwards."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": list(targets)} | config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * size)
    adapted.save_pretrained(directory, safe_serialization=True)
    return directory


def peft_answer(
    make_model: Callable[[], Any], directory: Path | None, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """Return the greedy answer of PEFT's own model with the adapter; None: of the model alone."""
    model = make_model()
    if directory is not None:
        model = PeftModel.from_pretrained(model, str(directory))
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return found[0, ids.shape[1] :].tolist()
