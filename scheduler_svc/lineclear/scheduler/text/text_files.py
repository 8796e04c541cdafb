"""Read tokenizer, chat template and generation config of a model directory as one consistent set."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lineclear.model_files.fingerprint import text_fingerprint
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.model_dir import read_json
from lineclear.scheduler.text.chat_template import ChatTemplate, load_chat_template
from lineclear.scheduler.text.tokenizer import Tokenizer, load_tokenizer

_ATTEMPTS = 3


class TextFiles(NamedTuple):
    """The parsed files, and their fingerprint."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    generation_config: dict[str, Any] | None
    fingerprint: str


def read_text_files(model: Path) -> TextFiles:
    """Read the files again if one changes while they are read. Raises ConfigurationError with the reason."""
    for _ in range(_ATTEMPTS):
        before = _fingerprint(model)
        tokenizer = load_tokenizer(model)
        chat = load_chat_template(model, tokenizer)
        generation_config = read_json(model / "generation_config.json")
        if _fingerprint(model) == before:
            return TextFiles(tokenizer, chat, generation_config, before)
    raise ConfigurationError(f"{model}: the tokenizer files keep changing; start again once they are complete")


def _fingerprint(model: Path) -> str:
    try:
        return text_fingerprint(model)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from None
