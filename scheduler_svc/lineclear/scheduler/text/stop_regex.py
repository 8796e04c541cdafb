"""Find the first match of a stop regex while the text of an answer arrives in pieces.

An own simulation of a nondeterministic automaton (Glushkov 1961; Thompson 1968), because it must say which text may
still become a match, and because `re` takes exponential time for some patterns. A character costs at most as many steps
as the pattern has transitions, which are limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

MAX_PATTERN_BYTES = 256
MAX_MATCH = 256
"""Characters of a match; text is held back for no longer than that."""
_MAX_POSITIONS, _MAX_TRANSITIONS, _MAX_DEPTH, _MAX_REPEATS = 48, 128, 16, 48
_MAX_ATOMS, _MAX_KNOWN = 160, 4096
_BRACES = re.compile(r"([0-9]+)(?:(,)([0-9]*))?}")

_Accepts = Callable[[str], bool]
_CLASSES: dict[str, _Accepts] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
    "D": lambda c: not c.isdecimal(),
    "W": lambda c: not c.isalnum() and c != "_",
    "S": lambda c: not c.isspace(),
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class BadPattern(ValueError):
    """The pattern is not supported; the message says why."""


class _Part(NamedTuple):
    """A part of the automaton: where it may begin and end, as positions, and whether it matches the empty text."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    is_empty: bool = True


class StopRegex:
    """The automaton of one pattern. Shared by the outputs of a request. Raises BadPattern.

    The syntax is that of Rust's regex crate without flags, anchors, word boundaries, lazy repetition and classes by
    name other than d, w and s.
    """

    __slots__ = ("_accepts", "_follow", "_known", "_num_atoms", "_text", "_where", "last")

    def __init__(self, pattern: str) -> None:
        self._accepts: list[_Accepts] = []
        self._follow: list[dict[int, None]] = [{}]  # of the start, then of each position
        self._known: dict[tuple[int, str], tuple[int, ...]] = {}
        self._text, self._where, self._num_atoms = pattern, 0, 0
        whole = self._alternatives(0)
        if self._where < len(pattern):
            raise BadPattern("has a closing parenthesis without an opening one")
        if whole.is_empty:
            raise BadPattern("matches the empty text")
        self._link((0,), whole.first)
        self.last = frozenset(whole.last)
        """The positions where a match may end."""

    def matcher(self, *, include_stop_string: bool) -> RegexMatcher:
        return RegexMatcher(self, include_stop_string=include_stop_string)

    def after(self, position: int, char: str) -> tuple[int, ...]:
        """Return the positions that `char` leads to; position 0 is the start."""
        found = self._known.get((position, char))
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = tuple(next_ for next_ in self._follow[position] if self._accepts[next_ - 1](char))
            self._known[position, char] = found
        return found

    def _alternatives(self, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise BadPattern(f"has more than {_MAX_DEPTH} nested groups")
        parts = [_Part()]
        while self._where < len(self._text) and self._text[self._where] != ")":
            if self._take("|"):
                parts.append(_Part())
            else:
                parts[-1] = self._joined(parts[-1], self._repeated(depth))
        first = tuple(dict.fromkeys(p for part in parts for p in part.first))
        last = tuple(dict.fromkeys(p for part in parts for p in part.last))
        return _Part(first, last, any(part.is_empty for part in parts))

    def _joined(self, before: _Part, then: _Part) -> _Part:
        self._link(before.last, then.first)
        first = (*before.first, *then.first) if before.is_empty else before.first
        last = (*before.last, *then.last) if then.is_empty else then.last
        return _Part(first, last, before.is_empty and then.is_empty)

    def _repeated(self, depth: int) -> _Part:
        begin = self._where
        part = self._atom(depth)
        least, most = self._bounds()
        if (least, most) == (1, 1):
            return part
        end = self._where
        if self._where < len(self._text) and self._text[self._where] in "*+?{":
            raise BadPattern("repeats a repetition, or is lazy")
        whole = _Part()
        copies = most if most is not None else max(least, 1)
        for number in range(copies):  # the first copy is there; each other one is read again
            if number:
                self._where = begin
                part = self._atom(depth)
            if most is None and number == copies - 1:
                self._link(part.last, part.first)
            whole = self._joined(whole, part if number < least else part._replace(is_empty=True))
        self._where = end
        return whole

    def _bounds(self) -> tuple[int, int | None]:
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                return bounds
        if not self._take("{"):
            return 1, 1
        found = _BRACES.match(self._text, self._where)
        if found is None:
            raise BadPattern("has a brace that is no number of repetitions; escape it")
        self._where = found.end()
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > _MAX_REPEATS or (most is not None and most < max(least, 1)):
            raise BadPattern(f"has a number of repetitions that is not in [1, {_MAX_REPEATS}]")
        return least, most

    def _atom(self, depth: int) -> _Part:
        self._num_atoms += 1
        if self._num_atoms > _MAX_ATOMS:
            raise BadPattern("has too many repetitions")
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise BadPattern("has a group with flags, a name or look-around; use (?:...)")
            part = self._alternatives(depth + 1)
            if not self._take(")"):
                raise BadPattern("has an opening parenthesis without a closing one")
            return part
        if char == "[":
            return self._position(self._set())
        if char == ".":
            return self._position(lambda c: c != "\n")
        if char in "*+?{}^$":
            raise BadPattern(f"has an unsupported {char}; escape it to match the character")
        if char == "\\" and (accepts := self._class()) is not None:
            return self._position(accepts)
        return self._position(self._literal(char).__eq__)

    def _class(self) -> _Accepts | None:
        """Take the class that a backslash begins; None if it escapes a character."""
        accepts = _CLASSES.get(self._text[self._where : self._where + 1])
        self._where += accepts is not None
        return accepts

    def _literal(self, char: str) -> str:
        """Return the character that `char` stands for, which may begin an escape."""
        if char != "\\":
            return char
        char = self._next()
        if char.isalnum() and char not in _ESCAPES:
            raise BadPattern(f"has an unsupported escape \\{char}")
        return _ESCAPES.get(char, char)

    def _set(self) -> _Accepts:
        is_negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        classes: list[_Accepts] = []
        while not ((ranges or classes) and self._take("]")):  # the first may be "]" itself
            char = self._next()
            if char in "[&~":
                raise BadPattern("has an unsupported set; escape [, & and ~")
            if char == "\\" and (accepts := self._class()) is not None:
                classes.append(accepts)
                continue
            low = high = self._literal(char)
            if not self._text.startswith("-]", self._where) and self._take("-"):
                high = self._literal(self._next())
            if high < low:
                raise BadPattern("has a range of characters whose end is before its start")
            ranges.append((low, high))
        return lambda c: (any(a <= c <= z for a, z in ranges) or any(test(c) for test in classes)) != is_negated

    def _position(self, accepts: _Accepts) -> _Part:
        self._accepts.append(accepts)
        self._follow.append({})
        position = len(self._accepts)
        if position > _MAX_POSITIONS:
            raise BadPattern(f"has more than {_MAX_POSITIONS} characters and sets, repetitions included")
        return _Part((position,), (position,), is_empty=False)

    def _link(self, before: tuple[int, ...], then: tuple[int, ...]) -> None:
        for position in before:
            self._follow[position].update(dict.fromkeys(then))
        if sum(map(len, self._follow)) > _MAX_TRANSITIONS:
            raise BadPattern(f"has more than {_MAX_TRANSITIONS} transitions between its characters; make it simpler")

    def _take(self, char: str) -> bool:
        is_there = self._text.startswith(char, self._where)
        self._where += is_there
        return is_there

    def _next(self) -> str:
        if self._where == len(self._text):
            raise BadPattern("ends too early")
        self._where += 1
        return self._text[self._where - 1]


class RegexMatcher:
    """Release text up to the match that ends first; of those that end together, the longest one.

    The result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_regex", "_threads", "matched")

    def __init__(self, regex: StopRegex, *, include_stop_string: bool) -> None:
        self._regex = regex
        self._include = include_stop_string
        self._held = ""
        self._threads: dict[int, int] = {}  # by position, the start of its longest text in `_held`; ascending
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Return the text that can be released. A match that ends while not `armed` does not count."""
        after, last, begin = self._regex.after, self._regex.last, len(self._held)
        text = self._held + text
        threads = self._threads
        for index in range(begin, len(text)):
            char = text[index]
            if threads:
                reached: dict[int, int] = {}
                for position, start in threads.items():
                    if index - start < MAX_MATCH:
                        for next_ in after(position, char):
                            reached.setdefault(next_, start)
                for next_ in after(0, char):
                    reached.setdefault(next_, index)
                threads = reached
            elif first := after(0, char):
                threads = dict.fromkeys(first, index)
            else:
                continue
            ends = (start for position, start in threads.items() if position in last) if armed else ()
            if (longest := next(iter(ends), None)) is not None:
                self.matched, self._held = text[longest : index + 1], ""
                return text[: index + 1 if self._include else longest]
        first_start = next(iter(threads.values()), len(text))
        self._held = text[first_start:]
        self._threads = (
            {position: start - first_start for position, start in threads.items()} if first_start else threads
        )
        return text[:first_start]

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held, self._threads = self._held, "", {}
        return held
