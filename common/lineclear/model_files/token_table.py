"""The bytes of each token of a model, for grammars (llguidance)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLParserLimits, LLTokenizer

from lineclear.model_files.special_tokens import mark_special, special_names

_MAX_LEXER_STATES = 50_000
"""Of one grammar; a state takes one to two kilobytes."""
_MAX_MASK_ITEMS = 2_000
"""Items of the parser in one mask or token, which take about a microsecond each. Ordinary schemas and programming
languages need less than 500 with 4,096 tokens; the work of an ambiguous grammar grows with each token of the answer."""
_MAX_MASK_EXPRESSIONS = 50_000
"""Expressions that the lexer may build in one mask: at most 6 ms, where llguidance's 200,000 take 90 ms."""


def token_table(directory: Path, vocab_size: int | None = None, eos_ids: Sequence[int] = ()) -> LLTokenizer:
    """Read the tokenizer of a model directory. `vocab_size` is the width of the logits; None: the tokenizer's own.

    Raises OSError or ValueError for a missing tokenizer, or one that splits no text into bytes.
    """
    definition = json.loads((directory / "tokenizer.json").read_bytes())
    mark_special(definition, special_names(_config(directory / "tokenizer_config.json")))
    return LLTokenizer(json.dumps(definition), n_vocab=vocab_size, eos_token=list(eos_ids) or None)


def special_texts(table: LLTokenizer) -> tuple[str, ...]:
    """Return the texts of the tokens that text in a grammar does not stand for."""
    ids = (i for i in range(table.vocab_size) if table.is_special_token(i))
    return tuple(filter(None, (table.decode_bytes([i]).decode(errors="replace") for i in ids)))


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar. A mask takes at most about 10 ms, compiling is limited by time as well."""
    return LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES,
        step_max_items=_MAX_MASK_ITEMS,
        step_lexer_fuel=_MAX_MASK_EXPRESSIONS,
        verbose_errors=False,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
