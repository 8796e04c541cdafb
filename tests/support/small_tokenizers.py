"""Small tokenizers of every kind that models use, built locally without downloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "user assistant system message content Hello, how are you today? I am fine.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "いろはにほへと ちりぬるを",
    "def f(x):\n    return x + 1\n\n",
] * 4


def _made_once(make: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """Return copies of one tokenizer: training twice does not give the same ids."""
    trained = cache(lambda: make().to_str())
    return wraps(make)(lambda: Tokenizer.from_str(trained()))


@_made_once
def byte_level() -> Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens([AddedToken("<|late|>", special=True, rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@_made_once
def _sentencepiece_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=620, special_tokens=[*SPECIAL, *bytes_], limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [t for t in definition["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral: bytes as tokens, and an added leading space."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gemma_like() -> Tokenizer:
    """Return a tokenizer with bytes as tokens and no added leading space."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """Return a tokenizer like newer conversions of Llama 2: a leading space at the start of the text only."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@_made_once
def unigram() -> Tokenizer:
    """Return a tokenizer like that of T5: special tokens are in the model's own vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@_made_once
def word_level() -> Tokenizer:
    """Return a tokenizer of words without a decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return tokenizer


@_made_once
def word_piece() -> Tokenizer:
    """Return a tokenizer like that of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "gemma_like": gemma_like,
    "metaspace_first": metaspace_first,
    "unigram": unigram,
    "word_level": word_level,
    "word_piece": word_piece,
}


def definition(tokenizer: Tokenizer) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def save(directory: Path, tokenizer: Tokenizer, template: str | None = None, **config: Any) -> Path:
    """Write the files of a model directory except the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
