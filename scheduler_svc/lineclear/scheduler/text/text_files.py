"""Read tokenizer, chat template and generation config of a model directory as one consistent set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lineclear.model_files.fingerprint import text_fingerprint
from lineclear.model_files.special_tokens import token_text
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.text.special_token_seal import Seal
from lineclear.scheduler.text.template_renderer import ChatTemplate, InvalidTemplate
from lineclear.scheduler.text.tokenizer import Tokenizer, load_tokenizer, read_json

_ATTEMPTS = 3
_MAX_TEMPLATE_BYTES = 1024 * 1024


class TextFiles(NamedTuple):
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    generation_config: dict[str, Any] | None
    fingerprint: str


def read_text_files(model: Path) -> TextFiles:
    """Read the files again if one changes while they are read. Raises ConfigurationError with the reason."""
    for _ in range(_ATTEMPTS):
        before = _fingerprint(model)
        tokenizer = load_tokenizer(model)
        chat = load_chat_template(model, tokenizer.seal)
        generation_config = read_json(model / "generation_config.json")
        if _fingerprint(model) == before:
            return TextFiles(tokenizer, chat, generation_config, before)
    raise ConfigurationError(f"{model}: the tokenizer files keep changing; start again once they are complete")


def load_chat_template(model: Path, seal: Seal) -> ChatTemplate | None:
    """Load chat_template.jinja, else the template in tokenizer_config.json; None if the model has neither.

    Of a list of named templates, "tool_use" renders conversations with tools, as in transformers. Raises
    ConfigurationError if a template is invalid.
    """
    config = read_json(model / "tokenizer_config.json") or {}
    source, tool_source = _template_file(model / "chat_template.jinja"), ""
    if source is None:
        named = config.get("chat_template")
        if isinstance(named, list):  # a list of named templates
            templates = {t.get("name"): t.get("template") for t in named if isinstance(t, Mapping)}
            named = templates.get("default")
            tool_source = str(templates.get("tool_use") or "")
        source = named if isinstance(named, str) else None
    if source is None:
        return None
    if max(len(source), len(tool_source)) > _MAX_TEMPLATE_BYTES:
        raise ConfigurationError(f"the model's chat template is larger than {_MAX_TEMPLATE_BYTES} bytes")
    names = {name: token_text(value) for name, value in config.items() if name.endswith("_token")}
    variables = {name: text for name, text in names.items() if text is not None}
    try:
        return ChatTemplate(source, seal, variables, tool_source)
    except InvalidTemplate as error:
        raise ConfigurationError(str(error)) from None


def _template_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8") from None


def _fingerprint(model: Path) -> str:
    try:
        return text_fingerprint(model)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from None
