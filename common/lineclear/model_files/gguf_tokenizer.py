"""tokenizer.json and tokenizer_config.json of a GGUF file.

A file holds a vocabulary, types and scores of tokens, and for byte-level BPE merges and the name of the expression that
splits text first. For SentencePiece's BPE the merges follow from the vocabulary, as transformers makes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from .gguf_file import GgufBroken

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_MAX_MERGED_CHARACTERS = 128
_SPACE = "\u2581"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ""
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo"), _GPT2),
    "tekken": _TEKKEN,
    "smollm": r"\p{N}",
}
"""How `tokenizer.ggml.pre` splits text; empty: as GPT-2, by the library's own expression."""
_WITHOUT_PRE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
"""Of files from before that key, by architecture."""
_STARTS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json. Raises GgufBroken."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _distinct(_texts(metadata, "tokens"))
    architecture = str(metadata.get("general.architecture"))
    if kind == "gpt2":
        pre = str(metadata.get("tokenizer.ggml.pre") or _WITHOUT_PRE.get(architecture))
        definition, starts = _byte_level(metadata, tokens, pre), pre in _STARTS_WITH_BOS
    elif kind == "llama":
        is_gemma = architecture.startswith("gemma")
        definition, starts = _sentencepiece(metadata, tokens, is_gemma=is_gemma), True
    else:
        raise GgufBroken(f"has a tokenizer of the kind {str(kind)[:100]}; {_KINDS}. {_CURE}")
    special = {name: _token(metadata, tokens, name) for name in ("bos", "eos", "unknown", "padding")}
    definition["added_tokens"] = _added(metadata, tokens, {i for i in special.values() if i is not None})
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {name: tokens[i] for key, name in names.items() if (i := special[key]) is not None}
    definition["post_processor"] = _post_processor(
        tokens,
        special["bos"] if _flag(metadata, "add_bos_token", starts) else None,
        special["eos"] if _flag(metadata, "add_eos_token", False) else None,
    )
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    if isinstance(with_tools := metadata.get("tokenizer.chat_template.tool_use"), str):
        named = {"default": config.get("chat_template", with_tools), "tool_use": with_tools}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return definition, config


_KINDS = "gpt2 and llama (BPE) are read"
_CURE = "Give the directory of the model that the file was made from: hf download OWNER/NAME"


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found:
        raise GgufBroken(f"has no tokenizer.ggml.{name}. {_CURE}")
    return found


def _distinct(tokens: list[str]) -> list[str]:
    """Return the tokens with unique names for repeated ones, which no text encodes to."""
    seen = set[str]()
    found = []
    for index, token in enumerate(tokens):
        original, names = token, count()
        while token in seen:  # a file may have these names, too
            token = f"[duplicate {index}{'.' * next(names)} of {original[:40]}]"
        seen.add(token)
        found.append(token)
    return found


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found if type(found) is int and 0 <= found < len(tokens) else None


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    found = metadata.get(f"tokenizer.ggml.{name}")
    return found if isinstance(found, bool) else default


def _added(metadata: Mapping[str, Any], tokens: Sequence[str], special: set[int]) -> list[dict[str, Any]]:
    stated = metadata.get("tokenizer.ggml.token_type")
    types = list(stated[: len(tokens)]) if isinstance(stated, array) else []
    types += [1] * (len(tokens) - len(types))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": i, "content": token, **flags, "special": kind != _USER_DEFINED or i in special}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token and (kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or i in special)
    ]


def _definition(model: dict[str, Any], normalizer: Any, pre_tokenizer: Any, decoder: Any) -> dict[str, Any]:
    steps = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}
    fixed = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {"version": "1.0", "truncation": None, "padding": None, **steps, "model": {"type": "BPE", **fixed, **model}}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], pre: str) -> dict[str, Any]:
    if pre not in _SPLITS:
        raise GgufBroken(f"has a tokenizer that splits text as {pre[:100]}; {', '.join(_SPLITS)} are read. {_CURE}")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in _texts(metadata, "merges")]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys() for pair in merges):
        raise GgufBroken(f"has merges of tokens that it does not have. {_CURE}")
    split, is_qwen = _SPLITS[pre], _SPLITS[pre] is _QWEN2
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [level | {"use_regex": split in (_GPT2, r"\p{N}")}]
    if split:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": split is _LLAMA3}
    return _definition(
        model | {"vocab": vocab, "merges": merges},
        {"type": "NFC"} if is_qwen else None,
        {"type": "Sequence", "pretokenizers": steps},
        level | {"use_regex": True},
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], *, is_gemma: bool) -> dict[str, Any]:
    if is_gemma:  # its file spells runs of spaces as such, and its merges follow the order of the tokens
        tokens[:] = _distinct([_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens])
    scores = metadata.get("tokenizer.ggml.scores")
    if not is_gemma and (not isinstance(scores, array) or len(scores) != len(tokens)):
        raise GgufBroken(f"has no score for each token. {_CURE}")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranks = {token: float(-i if is_gemma or scores is None else scores[i]) for token, i in vocab.items()}
    unknown = _token(metadata, tokens, "unknown")
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    normalizers, decoders = [replaced], [restored, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if _flag(metadata, "add_space_prefix", not is_gemma):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {"unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    return _definition(
        model | {"ignore_merges": False, "vocab": vocab, "merges": _merges(vocab, ranks)},
        {"type": "Sequence", "normalizers": normalizers},
        None,
        {"type": "Sequence", "decoders": decoders},
    )


def _merges(vocab: Mapping[str, int], ranks: Mapping[str, float]) -> list[list[str]]:
    """Return the pairs that make a token, the best ones first."""
    found: list[tuple[str, str, float]] = []
    for token, rank in ranks.items():
        if len(token) <= _MAX_MERGED_CHARACTERS and rank == rank:
            pairs = ((token[:i], token[i:], rank) for i in range(1, len(token)))
            known = (pair for pair in pairs if pair[0] in vocab and pair[1] in vocab)
            found.extend(sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])))
    found.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    return [[left, right] for left, right, _ in found]


def _post_processor(tokens: Sequence[str], bos: int | None, eos: int | None) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for number, name in enumerate(sequences):
            parts += [{"SpecialToken": {"id": tokens[bos], "type_id": number}}] if bos is not None else []
            parts.append({"Sequence": {"id": name, "type_id": number}})
            parts += [{"SpecialToken": {"id": tokens[eos], "type_id": number}}] if eos is not None else []
        return parts

    known = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (bos, eos) if i is not None}
    return {"type": "TemplateProcessing", "single": template("A"), "pair": template("A", "B"), "special_tokens": known}
