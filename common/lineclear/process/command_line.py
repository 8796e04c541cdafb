"""Flags of a settings class on a command line: --name VALUE, --name=VALUE, --switch and --no-switch.

Every wrong flag or word gets a sentence, all at once. Values are checked later, by pydantic.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pydantic import BaseModel

from .flag_aliases import OTHER_SERVERS, names_of
from .setting_fields import allowed, flag_of

_NEAR = 0.85  # a letter or two: --max-model-len, which the worker has, is no misspelling of --max-queue-size


class FlagValue(NamedTuple):
    """A setting on the command line."""

    flag: str
    """The flag as typed."""
    text: str
    """The flag with its value, as typed."""
    value: str | bool


class CommandLine(NamedTuple):
    """What a command line sets, and a sentence for each thing that is wrong with it."""

    values: dict[str, FlagValue]
    """By setting; the last flag of a setting counts."""
    errors: list[str]


def parse(
    kind: type[BaseModel],
    words: Sequence[str],
    *,
    unknown_flag: str,
    unknown_word: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> CommandLine:
    """Read the flags of the settings class `kind`.

    `unknown_flag` is what to do about a flag that resembles none of them, `unknown_word` about a word that belongs to
    no flag, `elsewhere` about each flag of another program. `{}` in them stands for the flag with its value, or the
    word.
    """
    flags, line = _flags(kind), CommandLine({}, [])
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, equals, value = word.partition("=")
        has_next = bool(remaining) and not _is_flag(remaining[0])
        if flag not in flags:
            if not _is_flag(word):
                line.errors.append(_stray(word, unknown_word))
            else:
                text = f"{word} {remaining.pop(0)}" if has_next and not equals else word
                line.errors.append(_unknown(flag, text, flags, elsewhere, unknown_flag))
            continue
        name, switch = flags[flag]
        if switch is not None:
            if equals:
                line.errors.append(_switch_with_value(word, flag, switch))
            line.values[name] = FlagValue(flag, word, switch)
        elif equals:
            line.values[name] = FlagValue(flag, word, value)
        elif has_next:
            value = remaining.pop(0)
            line.values[name] = FlagValue(flag, f"{flag} {shlex.quote(value)}", value)
        else:
            line.errors.append(f"{flag} has no value; give {allowed(kind.model_fields[name])}")
    return line


def _flags(kind: type[BaseModel]) -> dict[str, tuple[str, bool | None]]:
    """Return setting and value of each flag. The value is None if it follows the flag."""
    flags: dict[str, tuple[str, bool | None]] = {}
    for name, field in kind.model_fields.items():
        for flag in map(flag_of, names_of(name)):
            if field.annotation is bool:
                flags[flag], flags[f"--no-{flag[2:]}"] = (name, True), (name, False)
            else:
                flags[flag] = (name, None)
    return flags


def _is_flag(word: str) -> bool:
    """Return whether the word is a flag, not a value: a negative number is a value."""
    try:
        float(word)
    except ValueError:
        return len(word) > 1 and word.startswith("-")
    return False


def _unknown(flag: str, text: str, known: Collection[str], elsewhere: Mapping[str, str], otherwise: str) -> str:
    if hint := OTHER_SERVERS.get(flag) or elsewhere.get(flag, "").format(text):
        return f"there is no flag {flag}; {hint}"
    if near := difflib.get_close_matches(flag, [*known, *elsewhere], n=1, cutoff=_NEAR):
        hint = elsewhere.get(near[0], "").format(near[0])
        return f"there is no flag {flag}; is it {near[0]}?" + (f" {hint[0].upper()}{hint[1:]}" if hint else "")
    return f"there is no flag {flag}; {otherwise}"


def _stray(word: str, otherwise: str) -> str:
    return f"there is no argument {word}" + (f"; {otherwise.format(word)}" if otherwise else "")


def _switch_with_value(word: str, flag: str, is_on: bool) -> str:
    name = flag if is_on else f"--{flag.removeprefix('--no-')}"
    return f"{word}: {name} takes no value; write {name} or --no-{name[2:]}"
