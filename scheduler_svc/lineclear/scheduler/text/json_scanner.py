"""Follow a JSON object in pieces, to find its end and the first character that cannot continue it (RFC 8259).

A scanner keeps the open brackets only, so its memory grows with the depth, which is limited.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
_SPACE = frozenset(" \t\n\r")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS = dict.fromkeys("0123456789", "d")
# For each part of a number, the part that each kind of character leads to; "d" is any digit.
_NUMBER = {
    "minus": {"0": "zero", "d": "whole"},
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": {"d": "whole", ".": "point", "e": "e", "E": "e"},
    "point": {"d": "fraction"},
    "fraction": {"d": "fraction", "e": "e", "E": "e"},
    "e": {"d": "exponent", "+": "sign", "-": "sign"},
    "sign": {"d": "exponent"},
    "exponent": {"d": "exponent"},
}
_NUMBER_ENDS = frozenset(("zero", "whole", "fraction", "exponent"))


class JsonScanner:
    """Follows one JSON object, from its first character `{` on."""

    __slots__ = ("_count", "_is_key", "_literal", "_open", "_state", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        """The object is complete."""
        self.is_broken = False
        """The next character cannot continue it."""
        self._open: list[str] = []
        self._state = "object"
        self._is_key = False  # whether the string in progress is a key
        self._literal = ""  # characters of true, false or null to come
        self._count = 0  # hexadecimal digits to come

    def feed(self, text: str, start: int = 0) -> int:
        """Follow `text` from `start` on. Return the index of the first character that is not part of the object."""
        index, end = start, len(text)
        while index < end:
            if self._state == "string":
                index = _PLAIN.match(text, index).end()  # type: ignore[union-attr]  # the pattern matches ""
                if index == end:
                    break
            if not self._step(text[index]):
                self.is_broken = True
                return index
            index += 1
            if self.is_done:
                return index
        return index

    def _step(self, c: str) -> bool:
        """Take one character. Return False if it cannot follow."""
        state = self._state
        if state == "string":
            return self._in_string(c)
        if state == "escape":
            return self._in_escape(c)
        if state == "hex":
            self._count -= 1
            self._state = "hex" if self._count else "string"
            return c in _HEX
        if state == "literal":
            expected, self._literal = self._literal[0], self._literal[1:]
            self._state = "literal" if self._literal else "after"
            return c == expected
        if state in _NUMBER:
            found = _NUMBER[state].get(c) or _NUMBER[state].get(_DIGITS.get(c, ""))
            if found is not None:
                self._state = found
                return True
            if state not in _NUMBER_ENDS:
                return False
            self._state = state = "after"
        return c in _SPACE or self._in_structure(state, c)

    def _in_string(self, c: str) -> bool:
        if c == '"':
            self._state = "colon" if self._is_key else "after"
        elif c == "\\":
            self._state = "escape"
        else:
            return c >= " "
        return True

    def _in_escape(self, c: str) -> bool:
        self._state, self._count = ("hex", 4) if c == "u" else ("string", 0)
        return c in 'u"\\/bfnrt'

    def _in_structure(self, state: str, c: str) -> bool:
        if state == "object":
            return c == "{" and self._begin_container(c)
        if state == "colon":
            self._state = "value"
            return c == ":"
        if state in ("key", "first_key"):
            self._state, self._is_key = "string", True
            return c == '"' or (state == "first_key" and c == "}" and self._end_container())
        if state == "after":
            if c == ",":
                self._state = "key" if self._open[-1] == "{" else "value"
                return True
            return c == ("}" if self._open[-1] == "{" else "]") and self._end_container()
        if state == "first_value" and c == "]":
            return self._end_container()
        return self._begin_value(c)

    def _begin_value(self, c: str) -> bool:
        if c == '"':
            self._state, self._is_key = "string", False
        elif c in "{[":
            return self._begin_container(c)
        elif c in _LITERALS:
            self._state, self._literal = "literal", _LITERALS[c]
        elif c == "-":
            self._state = "minus"
        elif c in _DIGITS:
            self._state = "zero" if c == "0" else "whole"
        else:
            return False
        return True

    def _begin_container(self, c: str) -> bool:
        self._open.append(c)
        self._state = "first_key" if c == "{" else "first_value"
        return len(self._open) <= MAX_DEPTH

    def _end_container(self) -> bool:
        self._open.pop()
        self._state = "after"
        self.is_done = not self._open
        return True
