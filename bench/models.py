"""Makes models of real shapes with random weights, as Hugging Face directories; speed does not depend on the weights.

    python -m bench.models --out DIR [--only llama-110m-shape]

Weights come from a fixed seed. The tokenizer is a byte-level BPE trained on the text of Python's standard library.
`random_model` makes a model in memory, on any device.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

SEED = 7
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPECIAL = ("<pad>", "<s>", "</s>")
_SMALL_TOKENIZER, _LARGE_TOKENIZER = 4096, 16384
_MOST_FILES = 200
_FAMILY_TOKENIZER = 1024, 20  # tokens and files; nobody reads the text


class Shape(NamedTuple):
    """The configuration and dtype of a model."""

    dtype: torch.dtype
    config: Callable[[], Any]


def _qwen3(hidden_size: int) -> Any:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **_IDS,
    )


def _llama_110m() -> Any:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **_IDS,
    )


def _llama_7m() -> Any:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **_IDS,
    )


def _llama_8b() -> Any:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **_IDS,
    )


def _llama_1b() -> Any:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        **_IDS,
    )


def _gemma3_270m() -> Any:
    return Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=4096,
        **_IDS,
    )


def _experts(config: type, num_experts: int, intermediate_size: int, **others: Any) -> Any:
    """Return a shape of 0.4 B parameters, of which each token uses four experts."""
    return config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=intermediate_size,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        num_local_experts=num_experts,
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        **others,
        **_IDS,
    )


def _gpt2_124m() -> Any:
    return GPT2Config(bos_token_id=1, eos_token_id=2, pad_token_id=0)


SHAPES = {
    "llama-8b-shape": Shape(torch.bfloat16, _llama_8b),
    "llama-1b-shape": Shape(torch.bfloat16, _llama_1b),
    "llama-110m-shape": Shape(torch.bfloat16, _llama_110m),
    "qwen3-0.6b-shape": Shape(torch.bfloat16, lambda: _qwen3(1024)),
    "qwen3-1.7b-shape": Shape(torch.bfloat16, lambda: _qwen3(2048)),
    "gemma3-270m-shape": Shape(torch.bfloat16, _gemma3_270m),
    "qwen3-moe-0.4b-shape": Shape(
        torch.bfloat16, lambda: _experts(Qwen3MoeConfig, 32, 2048, moe_intermediate_size=384, norm_topk_prob=True)
    ),
    "gpt-oss-0.4b-shape": Shape(
        torch.bfloat16,
        lambda: _experts(GptOssConfig, 16, 768, rope_parameters={"rope_type": "default", "rope_theta": 15e4}),
    ),
    "llama-7m-shape": Shape(torch.float32, _llama_7m),
    "gpt2-124m-shape": Shape(torch.float32, _gpt2_124m),
}


CPU_SHAPES = ["llama-110m-shape", "qwen3-0.6b-shape", "llama-7m-shape", "gpt2-124m-shape"]

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "gemma3_text": (Gemma3TextConfig, {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 64}),
    "gpt_oss": (
        GptOssConfig,
        {
            "sliding_window": 24,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
"""Small models for comparisons of tokens: grouped heads; windows and scaled embeddings; sinks and experts."""
_SMALL: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    **_IDS,
}
_WIDE_WEIGHTS = 0.1
"""Standard deviation of small models: wide enough that nearly no two logits are nearly equal."""


def random_model(shape: Shape, device: str = "cpu") -> Any:
    """Return a model of this shape in memory on `device`, where it is made."""
    torch.manual_seed(SEED)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=shape.dtype)  # type: ignore[no-untyped-call]


def build_family(family: str, folder: Path) -> Path:
    """Make a small float32 model of one of `FAMILIES` in `folder`; return its directory, which has no tokenizer."""
    config, changes = FAMILIES[family]
    model = random_model(Shape(torch.float32, lambda: config(**(_SMALL | changes))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "norm" not in name:  # biases and sinks are zero by default
                parameter.normal_(0.0, _WIDE_WEIGHTS)
    model.save_pretrained(folder / family)
    return folder / family


def build(name: str, folder: Path, device: str = "cpu") -> Path:
    """Make the model `name` in `folder`, unless it exists; return its directory."""
    path = folder / name
    if (path / "tokenizer.json").exists():  # written last
        return path
    model = random_model(SHAPES[name], device)
    model.save_pretrained(path)
    write_tokenizer(path, _SMALL_TOKENIZER if model.config.vocab_size <= _SMALL_TOKENIZER else _LARGE_TOKENIZER)
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, {SHAPES[name].dtype}")
    return path


def write_tokenizer(path: Path, vocabulary: int, num_files: int = _MOST_FILES) -> None:
    """Write a tokenizer with `vocabulary` tokens into a model directory."""
    _tokenizer(vocabulary, num_files).save_pretrained(path)


def _tokenizer(vocabulary: int, num_files: int) -> PreTrainedTokenizerFast:
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    bpe = ByteLevelBPETokenizer()
    bpe.train(files, vocab_size=vocabulary, min_frequency=2, special_tokens=list(_SPECIAL), show_progress=False)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe._tokenizer, pad_token=_SPECIAL[0], bos_token=_SPECIAL[1], eos_token=_SPECIAL[2]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the named models, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), default=list(CPU_SHAPES))
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), default=[], help="small models besides")
    parser.add_argument("--device", default="cpu", help="that computes the random weights")
    options = parser.parse_args(arguments)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in options.only:
        build(name, options.out, options.device)
    for family in options.family:
        write_tokenizer(build_family(family, options.out), *_FAMILY_TOKENIZER)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
