"""Which tokens of a model are special: those of tokenizer.json, and those that tokenizer_config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)


def token_text(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, a string or an object with `content`; else None."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) and content else None


def special_names(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the tokens that tokenizer_config.json names as special; for transformers they override tokenizer.json."""
    found: list[Any] = []
    for name in _NAMES:
        value = config.get(name)
        found.extend(value.values() if name == "extra_special_tokens" and isinstance(value, Mapping) else ())
        found.extend(value if isinstance(value, list) else [value])
    added = config.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("special"):
            found.append(token)
    return frozenset(text for text in map(token_text, found) if text is not None)


def mark_special(definition: dict[str, Any], named: frozenset[str]) -> None:
    """Mark the tokens `named` as special in a parsed tokenizer.json, in place; add those of its vocabulary only."""
    model = definition.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = {piece: i for i, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab or {}
    added = definition.setdefault("added_tokens", [])
    for content in sorted(named - {token["content"] for token in added}):
        if content in ids:  # a token without an id cannot be produced
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": ids[content], "content": content, "special": True, **flags})
    for token in added:
        token["special"] = token.get("special", False) or token["content"] in named
