"""What a process says of its command line: its version, and which flag a flag that it does not have may be.

Which flags there are, and what is wrong with a value, is in `options`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version

_UNRECOGNISED = "unrecognized arguments: "
_NEAR = 0.85  # a letter or two: --max-model-len, which the worker has, is no misspelling of --max-queue-size


def print_version(program: str, words: Sequence[str]) -> None:
    """Print the version and raise SystemExit(0) where that is all that is asked."""
    if list(words) == ["--version"]:
        print(f"{program} {version('lineclear')}")
        raise SystemExit(0)


def flag_names(names: Collection[str]) -> frozenset[str]:
    """The flags of settings with these names."""
    return frozenset(f"--{name.replace('_', '-')}" for name in names)


def unknown_flag_errors(
    said: str, known: Collection[str], *, elsewhere: Mapping[str, str] | None = None, otherwise: str, stray: str = ""
) -> str:
    """A line for each flag and word that argparse, by what it `said`, does not know; other complaints as they are.

    `elsewhere` are names that other programs have for our flags. `otherwise` is what to do about a flag that is like
    none of ours, `stray` about a word that belongs to no flag; `{}` in them is the flag with its value, or the word.
    """
    _, found, rest = said.partition(_UNRECOGNISED)
    if not found:
        return said.removeprefix("error parsing CLI: ")
    lines = []
    for flag, text in _groups(rest.split(" ")):
        if not flag:
            lines.append(f"there is no argument {text}" + (f"; {stray.format(text)}" if stray else ""))
            continue
        near = difflib.get_close_matches(flag, known, n=1, cutoff=_NEAR)
        if ours := (elsewhere or {}).get(flag):
            lines.append(f"there is no flag {flag}; it is {ours} here")
        elif near:
            lines.append(f"there is no flag {flag}; is it {near[0]}?")
        else:
            lines.append(f"there is no flag {flag}; {otherwise.format(text)}")
    return "\n".join(lines)


def _groups(words: Sequence[str]) -> list[tuple[str, str]]:
    """(flag, flag and value as written), or ("", a word that follows no flag)."""
    groups: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("-"):
            groups.append((word.partition("=")[0], word))
        elif groups and groups[-1][0] and " " not in groups[-1][1] and "=" not in groups[-1][1]:
            groups[-1] = (groups[-1][0], f"{groups[-1][1]} {word}")
        else:
            groups.append(("", word))
    return groups
