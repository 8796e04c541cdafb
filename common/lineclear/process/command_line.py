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


class Hints(NamedTuple):
    """What to do about unknown flags and words. `{}` stands for the flag with its value, or the word."""

    unknown_flag: str = "--help lists them"
    """About a flag that resembles no other."""
    unknown_word: str = ""
    """About a word that belongs to no flag."""
    elsewhere: Mapping[str, str] = MappingProxyType({})
    """About each flag of another program."""


def parse(
    kind: type[BaseModel], words: Sequence[str], hints: Hints | None = None
) -> tuple[dict[str, FlagValue], list[str]]:
    """Return the flags of the settings class `kind` by setting, and a sentence for each thing that is wrong.

    The last flag of a setting counts.
    """
    flags, remaining, hints = _flags(kind), list(words), hints or Hints()
    values: dict[str, FlagValue] = {}
    errors: list[str] = []
    while remaining:
        word = remaining.pop(0)
        flag, equals, value = word.partition("=")
        has_next = bool(remaining) and not _is_flag(remaining[0])
        if flag not in flags:
            if not _is_flag(word):
                hint = f"; {hints.unknown_word.format(word)}" if hints.unknown_word else ""
                errors.append(f"there is no argument {word}{hint}")
            else:
                text = f"{word} {remaining.pop(0)}" if has_next and not equals else word
                errors.append(_unknown(flag, text, flags, hints))
            continue
        name, switch = flags[flag]
        if switch is not None:
            if equals:
                positive = flag if switch else f"--{flag.removeprefix('--no-')}"
                errors.append(f"{word}: {positive} takes no value; write {positive} or --no-{positive[2:]}")
            values[name] = FlagValue(flag, word, switch)
        elif equals:
            values[name] = FlagValue(flag, word, value)
        elif has_next:
            value = remaining.pop(0)
            values[name] = FlagValue(flag, f"{flag} {shlex.quote(value)}", value)
        else:
            errors.append(f"{flag} has no value; give {allowed(kind.model_fields[name])}")
    return values, errors


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


def _unknown(flag: str, text: str, known: Collection[str], hints: Hints) -> str:
    elsewhere = hints.elsewhere
    if hint := OTHER_SERVERS.get(flag) or elsewhere.get(flag, "").format(text):
        return f"there is no flag {flag}; {hint}"
    if near := difflib.get_close_matches(flag, [*known, *elsewhere], n=1, cutoff=_NEAR):
        hint = elsewhere.get(near[0], "").format(near[0])
        return f"there is no flag {flag}; is it {near[0]}?" + (f" {hint[0].upper()}{hint[1:]}" if hint else "")
    return f"there is no flag {flag}; {hints.unknown_flag}"
