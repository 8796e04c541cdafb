"""Makes models of real shapes with random weights, as Hugging Face directories; speed does not depend on the weights.

    python -m bench.models --out DIR [--only llama-110m-shape]

Weights come from a fixed seed. The tokenizer is a byte-level BPE trained on the text of Python's standard library.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils.logging import disable_progress_bar

SEED = 7
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPECIAL = ("<pad>", "<s>", "</s>")
_SMALL_TOKENIZER, _LARGE_TOKENIZER = 4096, 16384
_MOST_FILES = 200


class Shape(NamedTuple):
    """The configuration and dtype of a model."""

    dtype: torch.dtype
    config: Callable[[], Any]


def _qwen3_06b() -> Any:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
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


def _gpt2_124m() -> Any:
    return GPT2Config(bos_token_id=1, eos_token_id=2, pad_token_id=0)


SHAPES = {
    "llama-110m-shape": Shape(torch.bfloat16, _llama_110m),
    "qwen3-0.6b-shape": Shape(torch.bfloat16, _qwen3_06b),
    "llama-7m-shape": Shape(torch.float32, _llama_7m),
    "gpt2-124m-shape": Shape(torch.float32, _gpt2_124m),
}


def build(name: str, folder: Path) -> Path:
    """Make the model `name` in `folder`, unless it exists; return its directory."""
    path = folder / name
    if (path / "tokenizer.json").exists():  # written last
        return path
    shape = SHAPES[name]
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=shape.dtype)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    vocabulary = _SMALL_TOKENIZER if model.config.vocab_size <= _SMALL_TOKENIZER else _LARGE_TOKENIZER
    _tokenizer(vocabulary).save_pretrained(path)
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, {shape.dtype}")
    return path


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_MOST_FILES]
    bpe = ByteLevelBPETokenizer()
    bpe.train(files, vocab_size=vocabulary, min_frequency=2, special_tokens=list(_SPECIAL), show_progress=False)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe._tokenizer, pad_token=_SPECIAL[0], bos_token=_SPECIAL[1], eos_token=_SPECIAL[2]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the named models, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    options = parser.parse_args(arguments)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in options.only:
        build(name, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
