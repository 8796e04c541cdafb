"""Find tool calls in the text of an answer while it arrives.

Content passes through, except for text that may become a marker. From a marker on, text is held back until the call
has a name and its arguments begin; then the arguments pass through. Text that is no call is content from its marker
on, and the search continues at the character that no call continues with. So each character is read at most twice,
and the result does not depend on how the text is cut into pieces.

Space around calls is no content: between two calls, before the first if the answer has no other text, and at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from lineclear.scheduler.text.call_formats import SPACE_PATTERN, CallFormat, CallSink, NotACall, Reader
from lineclear.scheduler.text.json_scanner import JsonScanner

MAX_HELD = 64 * 1024
"""Characters that are held back at most. A longer beginning of a call is content."""


class CallPart(NamedTuple):
    """New text of the call with this index. `name` is set in the first part of a call."""

    call: int
    name: str
    arguments: str


class CallParser:
    """Splits the text of one answer into content and calls of tools with these `names`."""

    def __init__(self, form: CallFormat, names: Set[str], special: Set[str] = frozenset()) -> None:
        """`special` are the markers that arrive through `push_special`. Written as text they are content."""
        self.names = names
        self.num_begun = self.num_complete = 0
        """Numbers of calls."""
        self.parts: list[CallPart] = []
        """New text of calls."""
        self._form = form
        self._opens = tuple(marker for marker in form.opens if marker not in special)
        self._closes = form.closes if form.closes not in special else ""
        self._firsts = (*self._opens, form.first) if form.first else self._opens
        self._space = SPACE_PATTERN
        self._search = re.compile("|".join(map(re.escape, self._opens))) if self._opens else None
        self._content: list[str] = []
        self._tail = ""  # may become a marker
        self._gap: list[str] | None = [] if form.opens else None  # space that may be around a call; None within content
        self._gap_size = 0
        self._may_close = False  # just after a call
        self._call: _Call | None = None  # in progress

    def push(self, text: str) -> None:
        start = 0
        while start < len(text):
            if self._call is not None:
                start = self._call.push(text, start)
                self._leave_call()
                continue
            if self._tail:
                text, start, self._tail = self._tail + text[start:], 0, ""
            start = self._find(text, start)

    def push_special(self, marker: str) -> None:
        if self._call is not None:
            is_part = self._call.take(marker)
            self._leave_call()
            if is_part:
                return
        self._end_tail()
        if marker in self._form.opens:
            self._open(marker)
        elif marker == self._form.closes and self._may_close:
            self._begin_gap()
        else:
            self._add_content(marker)

    def finish(self) -> None:
        """End the answer: what is held back is content, except for space around calls."""
        if self._call is not None and (held := "".join(self._call.held)).strip():
            self._add_content(held)
        self._call = None
        self._end_tail()
        if self._gap and not self.num_begun:
            self._add_content("")

    def take(self) -> tuple[str, tuple[CallPart, ...]]:
        """Return the new content and the new text of calls, one part for each call."""
        content = "".join(self._content)
        self._content.clear()
        if not self.parts:
            return content, ()
        parts = tuple(_merged(self.parts))
        self.parts.clear()
        return content, parts

    def _find(self, text: str, start: int) -> int:
        """Pass content on up to a marker. Return the index after it, or the length of `text`."""
        if self._gap is not None:
            start, is_outside = self._skip_gap(text, start)
            if not is_outside:
                return start
        match = self._search.search(text, start) if self._search is not None else None
        if match is not None:
            self._add_content(text[start : match.start()])
            self._open(match[0])
            return match.end()
        end = len(text) - partial_marker(text, start, self._opens)
        self._add_content(text[start:end])
        self._tail = text[end:]
        return len(text)

    def _skip_gap(self, text: str, start: int) -> tuple[int, bool]:
        """Skip space around calls, and a marker after it. Return the next index, and whether content is there."""
        assert self._gap is not None
        end = self._space.match(text, start).end()  # type: ignore[union-attr]  # the pattern matches ""
        if end > start:
            self._gap.append(text[start:end])
            self._gap_size += end - start
        if end == len(text) and self._gap_size <= MAX_HELD:
            return end, False
        if self._may_close and self._closes and text.startswith(self._closes, end):
            self._begin_gap()
            return end + len(self._closes), False
        for marker in self._firsts:
            if text.startswith(marker, end):
                self._open(marker)
                return end + len(marker), False
        awaited = (*self._firsts, self._closes) if self._may_close else self._firsts
        if any(len(marker) > len(text) - end and marker.startswith(text[end:]) for marker in awaited):
            self._tail = text[end:]
            return len(text), False
        self._add_content("")  # the space before it is content, too
        return end, True

    def _add_content(self, text: str) -> None:
        if self._gap is not None:
            self._content += self._gap
            self._gap, self._gap_size, self._may_close = None, 0, False
        if text:
            self._content.append(text)

    def _begin_gap(self, *, may_close: bool = False) -> None:
        self._gap, self._gap_size, self._may_close = [], 0, may_close

    def _end_tail(self) -> None:
        if self._tail:
            self._add_content(self._tail)
            self._tail = ""

    def _open(self, marker: str) -> None:
        """Begin a call after its marker."""
        is_first = marker == self._form.first
        read = self._form.read_first if is_first and self._form.read_first is not None else self._form.read
        self._call = _Call(self, read, [*(self._gap or ()), marker])
        self._gap, self._gap_size, self._may_close = None, 0, False

    def _leave_call(self) -> None:
        """Continue behind the call if it is over. Text that is no call is content."""
        call = self._call
        if call is None or not call.is_over:
            return
        self._call = None
        if call.is_complete:
            self._begin_gap(may_close=bool(self._form.closes))
            self._space = self._form.space_between
        else:
            self._add_content("".join(call.held))


class _Call:
    """The text after one marker, until its calls are complete or no call continues with it. Sink of its reader."""

    def __init__(self, parser: CallParser, read: Callable[[CallSink], Reader], held: list[str]) -> None:
        self.held = held
        """Text that is content if it is no call."""
        self.is_over = self.is_complete = False
        self._held_size = sum(map(len, held))
        self._parser = parser
        self._name = ""
        self._early: list[str] | None = []  # arguments before the name; None while they pass through
        self._scanner: JsonScanner | None = None
        self._reader = read(self)
        next(self._reader)

    def push(self, text: str, start: int) -> int:
        """Read `text` from `start` on. Return the index of the first character that is no part of the calls."""
        while start < len(text) and not self.is_over:
            if self._scanner is not None:
                start = self._read_object(self._scanner, text, start)
            else:
                start += self.take(text[start])
        return start

    def take(self, c: str) -> bool:
        """Read a character, or a special token. Return whether it is part of the calls."""
        if self._scanner is not None:
            self.is_over = True
            return False
        self._hold(c)
        try:
            self._scanner = self._reader.send(c)
        except StopIteration:
            self.is_over = self.is_complete = True
        except NotACall:
            self.held.pop()
            self.is_over = True
            return False
        else:
            self.is_over = self._held_size > MAX_HELD
        return True

    def _read_object(self, scanner: JsonScanner, text: str, start: int) -> int:
        end = scanner.feed(text, start)
        arguments = text[start:end]
        if self._early is not None:
            self._early.append(arguments)
            self._hold(arguments)
        elif arguments:
            self._parser.parts.append(CallPart(self._parser.num_begun - 1, "", arguments))
        if scanner.is_broken or self._held_size > MAX_HELD:
            self.is_over = True
        elif scanner.is_done:
            self._scanner = None
            try:
                next(self._reader)
            except StopIteration:
                self.is_over = self.is_complete = True
        return end

    def _hold(self, text: str) -> None:
        self.held.append(text)
        self._held_size += len(text)

    def _release(self) -> None:
        self.held.clear()
        self._held_size = 0

    def name(self, name: str) -> None:
        if name not in self._parser.names:
            raise NotACall
        self._name = name
        if self._early:
            self._begin("".join(self._early))

    def arguments(self, text: str) -> None:
        if self._name:
            self._begin(text)
        else:
            assert self._early is not None
            self._early.append(text)

    def complete(self) -> None:
        if not self._name:
            raise NotACall
        if self._early is not None:  # a call without arguments
            self._begin("{}")
        self._parser.num_complete += 1
        self._name, self._early = "", []  # of the next call after the same marker
        self._release()

    def _begin(self, arguments: str) -> None:
        self._parser.parts.append(CallPart(self._parser.num_begun, self._name, arguments))
        self._parser.num_begun += 1
        self._early = None
        self._release()


def partial_marker(text: str, start: int, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text[start:]` that is a proper beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text) - start), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _merged(parts: list[CallPart]) -> Iterator[CallPart]:
    first = 0
    for i in range(1, len(parts) + 1):
        if i == len(parts) or parts[i].call != parts[first].call:
            yield CallPart(parts[first].call, parts[first].name, "".join(part.arguments for part in parts[first:i]))
            first = i
