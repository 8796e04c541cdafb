"""Follow a JSON object in pieces, to find its end and the first character that cannot continue it (RFC 8259).

The grammar is one table: for each state, the state that each character leads to. A scanner keeps a state and the open
brackets only, so its memory grows with the depth, which is limited.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


def _each(characters: str, state: str) -> dict[str, str]:
    return dict.fromkeys(characters, state)


def _table() -> dict[str, dict[str, str]]:
    number = {".": "point", "e": "e", "E": "e"}
    digits, hexadecimal = "0123456789", "0123456789abcdefABCDEF"
    begins = {'"': "string", "{": "first key", "[": "first value", "-": "minus", "0": "zero"}
    begins |= _each("123456789", "whole") | {word[0]: word[0] for word in ("true", "false", "null")}
    after = {",": "comma", "}": "close", "]": "close"}
    table = {
        "object": {"{": "first key"},
        "first key": {'"': "key", "}": "close"},
        "next key": {'"': "key"},
        "colon": {":": "value"},
        "value": begins,
        "first value": begins | {"]": "close"},
        "after": after,
    }
    for state, rules in table.items():
        rules.update(_each(" \t\n\r", state))
    ended = _each(" \t\n\r", "after") | after
    table |= {
        "minus": _each(digits, "whole") | {"0": "zero"},
        "zero": ended | number,
        "whole": ended | number | _each(digits, "whole"),
        "point": _each(digits, "fraction"),
        "fraction": ended | _each(digits, "fraction") | {"e": "e", "E": "e"},
        "e": _each(digits, "exponent") | _each("+-", "sign"),
        "sign": _each(digits, "exponent"),
        "exponent": ended | _each(digits, "exponent"),
    }
    for word in ("true", "false", "null"):
        table |= {word[:n]: {word[n]: word[: n + 1]} for n in range(1, len(word))}
        table[word] = ended
    for text, end in (("key", "colon"), ("string", "after")):  # of which `feed` skips other characters
        table[text] = {'"': end, "\\": f"{text} escape"}
        table[f"{text} escape"] = _each('"\\/bfnrt', text) | {"u": f"{text} 4"}
        table |= {f"{text} {n}": _each(hexadecimal, f"{text} {n - 1}" if n > 1 else text) for n in (4, 3, 2, 1)}
    return table


_NEXT = _table()


class JsonScanner:
    """Follows one JSON object, from its first character `{` on."""

    __slots__ = ("_open", "_state", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        """The object is complete."""
        self.is_broken = False
        """The next character cannot continue it."""
        self._open: list[str] = []
        self._state = "object"

    def feed(self, text: str, start: int = 0) -> int:
        """Follow `text` from `start` on. Return the index of the first character that is not part of the object."""
        index, end = start, len(text)
        while index < end and not self.is_done:
            if self._state in ("string", "key"):
                index = _PLAIN.match(text, index).end()  # type: ignore[union-attr]  # the pattern matches ""
                if index == end:
                    break
            if not self._step(text[index]):
                self.is_broken = True
                break
            index += 1
        return index

    def _step(self, c: str) -> bool:
        """Take one character. Return False if it cannot follow."""
        state = _NEXT[self._state].get(c)
        if c in "{[" and state is not None:
            self._open.append(c)
        elif state == "comma":
            state = "next key" if self._open[-1] == "{" else "value"
        elif state == "close":
            if self._open.pop() + c not in ("{}", "[]"):
                return False
            self.is_done, state = not self._open, "after"
        self._state = state or ""
        return state is not None and len(self._open) <= MAX_DEPTH
