"""One chat template, rendered so that only the template can write special tokens.

Knows jinja2 and how transformers calls templates (the same helpers, the same variables). Runs in the sandbox of jinja2,
which bounds neither time nor memory; `template_process` does. Imports little, because that process waits for it.

How contents are kept from writing special tokens: before rendering, every character of a content that occurs in some
special token is swapped for a stand-in that occurs nowhere in the conversation; after rendering, what the template
wrote is sealed (`Tokenizer.seal`), and only then the stand-ins are swapped back. The swap is one character for one, so
a template may cut, join and trim contents as it likes, and put them between its own words, and still no character of
theirs becomes part of a special token. (Marks it looks for, as "</think>", are left to be found. What it cannot do is
change the case of contents.)
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from lineclear.errors import InvalidRequest, Violation

_EPOCH = datetime.datetime(1970, 1, 1)
_STAND_INS = range(0x100000, 0x10FFFE)  # a private-use plane: no model writes these


class ChatMessage(NamedTuple):
    """One message."""

    role: str
    content: str


class Sealer(Protocol):
    """The part of a tokenizer that rendering needs."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token, as the model writes it."""
        ...

    def seal(self, text: str) -> str:
        """`text` with the special tokens written in it made real."""
        ...


class InvalidTemplate(ValueError):
    """The source is no template of jinja2."""


class _Refused(Exception):
    """The template called raise_exception."""


class Renderer:
    """A template and its surroundings. Safe from any thread."""

    def __init__(self, source: str, sealer: Sealer, variables: Mapping[str, Any]) -> None:
        """`variables` are the names of special tokens a template may use, as bos_token. Raises InvalidTemplate."""
        self._sealer = sealer
        self._variables = dict(variables)
        environment = _environment()
        try:
            constants = environment.parse(source).find_all(jinja2.nodes.Const)
            self.literals = {node.value for node in constants if isinstance(node.value, str)}
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidTemplate(f"the model's chat template is not valid: {error}") from None
        self._keys = {c for token in sealer.special_tokens for c in token if not c.isspace()}
        kept = _harmless(self.literals, self._keys, sealer.special_tokens)
        self._kept = re.compile("(" + "|".join(map(re.escape, kept)) + ")") if kept else None

    def render(self, turns: Sequence[ChatMessage], *, add_generation_prompt: bool, time_us: int = 0) -> str:
        """The conversation as one text whose special tokens are sealed, as at that time (`wall_clock_us`; 0: now).

        Raises InvalidRequest if the template does not take this conversation.
        """
        stand_ins = self._stand_ins(turns)
        messages = [{"role": turn.role, "content": self._taint(turn.content, stand_ins)} for turn in turns]
        try:
            rendered = self._template.render(
                **self._variables,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=(_EPOCH + datetime.timedelta(microseconds=time_us or wall_clock_us())).strftime,
            )
        except _Refused as refusal:
            # Quoted only where it is fixed text of the template; otherwise it may hold what the caller wrote.
            reason = f": {refusal}" if str(refusal) in self.literals else ""
            raise not_taken(f"the model's chat template refuses this conversation{reason}") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
            raise not_taken("the model's chat template fails on this conversation") from None
        sealed = self._sealer.seal(rendered)
        return sealed.translate({ord(stand_in): key for key, stand_in in stand_ins.items()})

    def _stand_ins(self, turns: Sequence[ChatMessage]) -> dict[str, str]:
        used: set[str] = set().union(*(turn.content for turn in turns))
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        try:
            return {key: next(free) for key in sorted(self._keys)}
        except StopIteration:
            raise not_taken("the contents use up a whole private-use plane of Unicode") from None

    def _taint(self, content: str, stand_ins: Mapping[str, str]) -> str:
        table = {ord(key): stand_in for key, stand_in in stand_ins.items()}
        parts = self._kept.split(content) if self._kept else [content]
        parts[::2] = [part.translate(table) for part in parts[::2]]  # every other part is a kept literal
        return "".join(parts)


def wall_clock_us() -> int:
    """What a chat template takes for the time: local time, as microseconds since 1970-01-01 in the same time zone."""
    return (datetime.datetime.now() - _EPOCH) // datetime.timedelta(microseconds=1)


def not_taken(description: str) -> InvalidRequest:
    """Return the error for a conversation that the template does not take."""
    return InvalidRequest(description, violations=[Violation("chat.messages", description)])


def _harmless(literals: Iterable[str], keys: Set[str], special_tokens: Sequence[str]) -> list[str]:
    """Strings in the template's code that, found in a content, may be left for the code to find; longest first.

    A template may look for "</think>" in an answer, say. Left alone is what no special token could overlap, and only
    what looks like markup: a plain word is no mark that code would look for.
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


# --- what transformers offers to templates -------------------------------------------------------------------------


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise _Refused(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body
