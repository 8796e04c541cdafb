"""Load the chat template of a model directory, and list the roles it accepts.

`template_renderer` renders it, `template_process` does so in a process with limits, and `tokenizer` encodes the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lineclear.errors import NoChatTemplate
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.model_dir import read_json
from lineclear.scheduler.text.template_process import Conversation, choose, pack_definition
from lineclear.scheduler.text.template_renderer import ChatMessage, InvalidTemplate, Renderer, Sealer
from lineclear.scheduler.text.tokenizer import token_text
from lineclear.scheduler.text.tool_context import ToolContext

_MAX_TEMPLATE_BYTES = 1024 * 1024
_COMMON_ROLES = frozenset({"system", "user", "assistant"})


class ChatTemplate:
    """A model's chat template. Thread-safe."""

    def __init__(self, source: str, sealer: Sealer, variables: Mapping[str, Any], tool_source: str = "") -> None:
        """`variables` maps bos_token and others to special tokens. `tool_source` renders conversations with tools.

        Raises ConfigurationError if a template is bad.
        """
        self.source = tool_source or source
        """The template of conversations with tools."""
        self._sources = {"default": source} | ({"tool_use": tool_source} if tool_source else {})
        self._sealer, self._variables = sealer, variables
        try:
            self._renderers = {name: Renderer(text, sealer, variables) for name, text in self._sources.items()}
        except InvalidTemplate as error:
            raise ConfigurationError(str(error)) from None
        self._literals = set().union(*(renderer.literals for renderer in self._renderers.values()))

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return any(renderer.takes_tools for renderer in self._renderers.values())

    def knows_role(self, role: str) -> bool:
        """Whether the template accepts this role: a common one, or a literal of the template."""
        return role in _COMMON_ROLES or role in self._literals

    def render(
        self,
        chat_messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        time_us: int = 0,
        context: ToolContext = ToolContext(),  # noqa: B008 - immutable
    ) -> str:
        """Render in this process, without a time limit. Arguments and errors as Renderer.render."""
        conversation = Conversation(chat_messages, add_generation_prompt, time_us, context)
        return conversation.rendered_by(choose(self._renderers, conversation))

    def definition(self, *, cpu_seconds: float, max_bytes: int) -> bytes:
        """Return the definition that a template process renders from, with the limits for one conversation."""
        private = {token: self._sealer.seal(token) for token in self._sealer.special_tokens}
        return pack_definition(self._sources, private, self._variables, cpu_seconds=cpu_seconds, max_bytes=max_bytes)


def load_chat_template(model: Path, sealer: Sealer) -> ChatTemplate | None:
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
    return ChatTemplate(source, sealer, variables, tool_source)


def no_chat_template() -> NoChatTemplate:
    """Return the error for a conversation on a model without a chat template."""
    return NoChatTemplate("this model has no chat template; send text or token_ids instead of chat")


def _template_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8") from None
