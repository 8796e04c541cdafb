"""Render a chat template so that message contents cannot write special tokens.

Templates get the same helpers and variables as in transformers. jinja2's sandbox limits `range` and attributes, but not
time: an endless loop in a template would keep a thread and the interpreter lock. So this module is also the main of a
process with limits (`limited_child`), and imports little, to keep its start short.

Before rendering, each character of a content that occurs in some special token is replaced by a placeholder character
that occurs nowhere in the conversation. After rendering, the template's own special tokens are sealed
(`Tokenizer.seal`), then the placeholders are replaced back. A template may cut, join and trim contents, and no
character of them becomes part of a special token. Marks that a template searches for, as "</think>", stay as they are.
A template cannot change the case of contents.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from lineclear.errors import InvalidRequest, Violation
from lineclear.scheduler.text.limited_child import Refused, pack, serve
from lineclear.scheduler.text.special_token_seal import Seal
from lineclear.scheduler.text.tool_context import ToolContext, kept_words, opaque

_COMMON_ROLES = frozenset({"system", "user", "assistant"})
_EPOCH = datetime.datetime(1970, 1, 1)
_PLACEHOLDERS = range(0x100000, 0x10FFFE)  # a private-use plane, which models do not use
_NOT_ASCII = re.compile(r"[^\x00-\x7f\U00100000-\U0010fffd]+")


class ChatMessage(NamedTuple):
    role: str
    content: str


class Conversation(NamedTuple):
    chat_messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    time_us: int = 0
    """The template's time; 0: now."""
    context: ToolContext = ToolContext()

    def packed(self) -> bytes:
        """Return the content of a frame of the process."""
        head = {
            "roles": [message.role for message in self.chat_messages],
            "opens": self.add_generation_prompt,
            "time_us": self.time_us,
            "tools": self.context.tools,
            "message_fields": list(self.context.message_fields.items()),
        }
        return pack(head, [message.content for message in self.chat_messages])

    @classmethod
    def unpacked(cls, head: Mapping[str, Any], contents: list[str]) -> Conversation:
        """Return the conversation of a frame, its context parsed."""
        messages = list(map(ChatMessage, head["roles"], contents))
        context = ToolContext(head["tools"], dict(head["message_fields"])).parsed()
        return cls(messages, head["opens"], head["time_us"], context)


class InvalidTemplate(ValueError):
    """The source is not a valid jinja2 template."""


class _TemplateRefusal(Exception):
    """The template called raise_exception."""


class ChatTemplate:
    """A model's chat template. Thread-safe."""

    def __init__(self, source: str, seal: Seal, variables: Mapping[str, Any], tool_source: str = "") -> None:
        """`variables` maps bos_token and others to special tokens. `tool_source` renders conversations with tools.

        Raises InvalidTemplate.
        """
        self.source = tool_source or source
        """The template of conversations with tools."""
        self._plain = self._tool_use = _Renderer(source, seal, variables)
        if tool_source:
            self._tool_use = _Renderer(tool_source, seal, variables)
        self._literals = self._plain.literals | self._tool_use.literals
        self.takes_tools = self._plain.takes_tools or self._tool_use.takes_tools
        """Whether the template shows tools to the model."""
        self.definition = {
            "source": source,
            "tool_source": tool_source,
            "private": seal.private,
            "variables": variables,
        }
        """The definition that a template process renders from, without its limits."""

    def knows_role(self, role: str) -> bool:
        """Whether the template accepts this role: a common one, or a literal of the template."""
        return role in _COMMON_ROLES or role in self._literals

    def render(self, conversation: Conversation) -> str:
        """Return the conversation as text with sealed special tokens, without a time limit.

        Raises InvalidRequest if the template rejects the conversation.
        """
        return (self._tool_use if conversation.context.tools else self._plain).render(conversation)


class _Renderer:
    """One compiled template. Thread-safe."""

    def __init__(self, source: str, seal: Seal, variables: Mapping[str, Any]) -> None:
        """`variables` maps names such as bos_token to special tokens. Raises InvalidTemplate."""
        self._seal = seal
        self._variables = dict(variables)
        environment = _environment()
        try:
            parsed = environment.parse(source)
            constants = parsed.find_all(jinja2.nodes.Const)
            self.literals = {node.value for node in constants if isinstance(node.value, str)}
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(parsed)
            """Whether the template reads the variable `tools`."""
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidTemplate(f"the model's chat template is not valid: {error}") from None
        # Quotes stay: `tojson` must see them to escape them, and no special token consists of quotes alone.
        self._keys = {c for token in seal.private for c in token if not c.isspace() and c not in '"\\'}
        unchanged = _harmless(self.literals, self._keys, seal.private)
        self._unchanged = re.compile("(" + "|".join(map(re.escape, unchanged)) + ")") if unchanged else None
        self._kept_words = kept_words(self.literals)

    def render(self, conversation: Conversation) -> str:
        chat_messages, add_generation_prompt, time_us, context = conversation
        placeholders = self._placeholders(chat_messages, context)
        messages: list[dict[str, Any]] = [
            {"role": chat_message.role, "content": self._taint(chat_message.content, placeholders)}
            for chat_message in chat_messages
        ]
        table = {ord(key): placeholder for key, placeholder in placeholders.items()}
        try:
            for index, fields in context.message_fields.items():
                messages[index] |= opaque(fields, lambda text: text.translate(table), self._kept_words)
            tools = opaque(context.tools, lambda text: text.translate(table), self._kept_words) or None
            rendered = self._template.render(
                **self._variables,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                strftime_now=(_EPOCH + datetime.timedelta(microseconds=time_us or wall_clock_us())).strftime,
            )
        except _TemplateRefusal as refusal:
            # Quote only literals of the template: other text may contain parts of the prompt.
            reason = f": {refusal}" if str(refusal) in self.literals else ""
            raise not_taken(f"the model's chat template refuses this conversation{reason}") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
            raise not_taken("the model's chat template fails on this conversation") from None
        sealed = self._seal(rendered)
        return sealed.translate({ord(placeholder): key for key, placeholder in placeholders.items()})

    def _placeholders(self, chat_messages: Sequence[ChatMessage], context: ToolContext) -> dict[str, str]:
        used = context.characters.union(*(chat_message.content for chat_message in chat_messages))
        free = (chr(code) for code in _PLACEHOLDERS if chr(code) not in used)
        try:
            return {key: next(free) for key in sorted(self._keys)}
        except StopIteration:
            raise not_taken("the contents use every character of a private-use plane of Unicode") from None

    def _taint(self, content: str, placeholders: Mapping[str, str]) -> str:
        table = {ord(key): placeholder for key, placeholder in placeholders.items()}
        parts = self._unchanged.split(content) if self._unchanged else [content]
        parts[::2] = [part.translate(table) for part in parts[::2]]  # odd parts are literals that stay unchanged
        return "".join(parts)


def wall_clock_us() -> int:
    """Return the time that chat templates see: local time in microseconds since 1970-01-01 local time."""
    return (datetime.datetime.now() - _EPOCH) // datetime.timedelta(microseconds=1)


def not_taken(description: str) -> InvalidRequest:
    """Return the error for a conversation that the template rejects."""
    return InvalidRequest(description, violations=[Violation("chat.messages", description)])


def _harmless(literals: Iterable[str], keys: Set[str], special_tokens: Collection[str]) -> list[str]:
    """Return the template literals that stay unchanged in contents so that the template finds them, longest first.

    A template may search an answer for "</think>". A literal qualifies if it looks like markup and no special token
    can overlap it.
    """
    heads = {token[:n] for token in special_tokens for n in range(1, len(token) + 1)}
    tails = {token[-n:] for token in special_tokens for n in range(1, len(token) + 1)}
    everything = "\0".join(special_tokens)

    def overlaps(text: str) -> bool:
        return (
            text in everything
            or any(token in text for token in special_tokens)
            or any(text[n:] in heads or text[:-n] in tails for n in range(1, len(text)))
        )

    marks = (text for text in literals if keys & set(text) and not text.replace("_", "").isalnum())
    return sorted((text for text in marks if not overlaps(text)), key=lambda text: (-len(text), text))


# --- helpers that transformers passes to templates -------------------------------------------------------------------


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise _TemplateRefusal(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        # Placeholders stand for ASCII characters, too, and must survive.
        return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training. Rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _prepare(private: Mapping[str, str], max_bytes: int, **template: Any) -> Callable[[dict[str, Any], list[str]], str]:
    chat_template = ChatTemplate(seal=Seal(private), **template)

    def render(head: dict[str, Any], contents: list[str]) -> str:
        try:
            text = chat_template.render(Conversation.unpacked(head, contents))
            size = len(text.encode())
        except InvalidRequest as error:
            raise Refused(error.violations[0].description) from None
        except (MemoryError, UnicodeEncodeError):
            raise Refused("the model's chat template fails on this conversation") from None
        if size > max_bytes:
            raise Refused(f"the model's chat template makes more than {max_bytes} bytes of this conversation")
        return text

    return render


if __name__ == "__main__":
    serve(_prepare)
