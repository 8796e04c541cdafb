"""--help and --version of a process, from its settings class."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .flag_aliases import names_of
from .setting_fields import allowed, flag_of, groups

WIDTH: Final = 100
_COLUMN = 34
_WORDS = {"_file": "FILE", "config": "FILE", "directory": "DIR", "model": "DIR", "listen": "ADDRESS", "name": "NAME"}


def answer(kind: type[BaseModel], words: Sequence[str], *, program: str, prefix: str) -> None:
    """Print what -h, --help, --help=SETTING or a lone --version asks for, and raise SystemExit(0)."""
    if list(words) == ["--version"]:
        print(f"{program} {version('lineclear')}")
        raise SystemExit(0)
    for word in words:
        head, _, name = word.partition("=")
        if word == "-h" or head == "--help":
            print("\n".join(_one(kind, name, prefix) if name else _all(kind, program, prefix)))
            raise SystemExit(0)


def description(kind: type[BaseModel], field: FieldInfo) -> str:
    """Return the text of a setting in one line, with the names of settings replaced by their flags."""
    return re.sub(
        r"\b[a-z]+(_[a-z]+)+\b(?!\.json)",
        lambda word: flag_of(word[0]) if word[0] in kind.model_fields else word[0],
        " ".join((field.description or "").split()),
    )


def _all(kind: type[BaseModel], program: str, prefix: str) -> Iterator[str]:
    yield f"usage: {program} [--SETTING VALUE ...]"
    yield ""
    yield from _wrapped(" ".join((kind.__doc__ or "").split()))
    yield ""
    yield from _wrapped(
        f"The value in [] is the default. Each setting is also a variable in the environment: {prefix} and the name in"
        " capitals. --help=SETTING describes one in full."
    )
    found = groups(kind)
    for title in getattr(kind, "shown_groups", found):
        yield from ("", f"{title}:")
        for name, field in found[title].items():
            yield _line(kind, name, field)
    yield from ("", "Other:", _in_columns("-h, --help", "Show this"), _in_columns("--version", "Show the version"))


def _line(kind: type[BaseModel], name: str, field: FieldInfo) -> str:
    default = f" [{_default(field)}]" if _default(field) else ""
    meaning = re.split(r"(?<=\.)\s", description(kind, field))[0].removesuffix(".")
    line = _in_columns(_usage(name, field), f"{meaning}{default}")
    if get_origin(field.annotation) is Literal:
        longer = _in_columns(_usage(name, field), f"{meaning}: {', '.join(get_args(field.annotation))}{default}")
        return longer if len(longer) <= WIDTH else line
    return line


def _in_columns(usage: str, meaning: str) -> str:
    return f"  {usage:{_COLUMN}} {meaning}"


def _one(kind: type[BaseModel], name: str, prefix: str) -> Iterator[str]:
    name = name.removeprefix("--").replace("-", "_")
    name = next((own for own in kind.model_fields if name in names_of(own)), name)
    field = kind.model_fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        yield f"there is no setting {flag_of(name)}" + (f"; is it {flag_of(near[0])}?" if near else "")
        return
    yield _usage(name, field)
    yield from (f"  {line}" for line in _wrapped(description(kind, field), WIDTH - 2))
    yield from (f"  {line}" for line in _wrapped(f"Allowed: {allowed(field)}.", WIDTH - 2))
    yield f"  Default: {'required' if field.is_required() else _default(field) or 'empty'}."
    yield f"  In the environment: {prefix}{name.upper()}."
    if aliases := names_of(name)[1:]:
        yield f"  Also: {', '.join(map(flag_of, aliases))}."


def _usage(name: str, field: FieldInfo) -> str:
    if field.annotation is bool:
        return f"--[no-]{name.replace('_', '-')}"
    return f"{flag_of(name)} {_word(name, field)}"


def _word(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "NAME"
    if field.annotation in (int, float):
        return "S" if name.endswith("_seconds") else "MS" if name.endswith("_ms") else "N"
    return next((word for ending, word in _WORDS.items() if name.endswith(ending)), "TEXT")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _wrapped(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
