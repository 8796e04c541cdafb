"""Token ids to text, one token at a time: the incremental decoder and the stop-string matcher.

Decides which text of an answer may be sent now: bytes of an unfinished character wait for the rest of it, and text that
may become a stop string waits until it has or has not. Nothing here knows tokenizers (what a token decodes to comes
from `Pieces`), requests or streams.

Two laws, held by property tests: the pieces joined are the text of the whole, however the tokens arrive; and nothing
of a matched stop string is released unless it was asked to be.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Pieces(Protocol):
    """What each token contributes to a text. The text is the concatenation, decoded as UTF-8."""

    errors: str
    """How bytes that are no UTF-8 are decoded: the name of a codecs error handler."""

    known: dict[bool, dict[int, str]]
    """With special tokens and without: texts of tokens that are whole characters by themselves. Filled as they come."""

    def piece(self, token_id: int, *, first: bool) -> bytes | None:
        """The bytes of a token, at the beginning of a text or anywhere else; None where it has none at all."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of a text unless special tokens are kept."""
        ...


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


REPLACE_EACH = "lineclear.replace_each"
"""Error handler: one U+FFFD for each bad byte, as byte-fallback decoders do (`replace` gives one for each sequence)."""
codecs.register_error(REPLACE_EACH, _replace_each)


class IncrementalDecoder:
    """The text of a growing list of tokens. Costs the same for every token, however many came before."""

    __slots__ = ("_decoder", "_first", "_is_plain", "_keep_special", "_known", "_pieces")

    def __init__(self, pieces: Pieces, *, keep_special: bool) -> None:
        self._pieces = pieces
        self._keep_special = keep_special
        self._first = True
        self._known = pieces.known[keep_special]
        self._is_plain = False  # not at the beginning, and no bytes wait for the rest of their character
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.errors)

    def push(self, token_id: int) -> str:
        """The characters that the token completes."""
        if self._is_plain:
            known = self._known.get(token_id)
            if known is not None:
                return known
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        was_plain = self._is_plain
        if not self._keep_special and self._pieces.is_special(token_id):
            return ""
        piece = self._pieces.piece(token_id, first=self._first)
        if piece is None:
            return ""
        self._first = False
        text = self._decoder.decode(piece)
        self._is_plain = not self._decoder.getstate()[0]
        if was_plain and self._is_plain:
            self._known[token_id] = text
        return text

    def flush(self) -> str:
        """The end of the text: bytes still waiting for the rest of their character become U+FFFD."""
        return self._decoder.decode(b"", True)


def decode(pieces: Pieces, token_ids: Iterable[int], *, keep_special: bool) -> str:
    """The text of all the tokens at once."""
    decoder = IncrementalDecoder(pieces, keep_special=keep_special)
    parts = [decoder.push(token_id) for token_id in token_ids]
    return "".join(parts) + decoder.flush()


class StopStrings:
    """An automaton (Aho and Corasick, 1975) that finds the first of several strings to be complete.

    Made once for a request and not changed afterwards. In state s, the longest suffix of what was read that begins a
    stop string has `depth` characters; `hold[s]` is the same for those that do not complete one, so it is what must
    be held back; `match[s]` is the longest stop string that ends here, as an index, or -1.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.goto: list[dict[str, int]] = [{}]
        self.match = [-1]
        depth = [0]
        for index, string in enumerate(self.strings):
            state = 0
            for character in string:
                following = self.goto[state].get(character)
                if following is None:
                    following = len(self.goto)
                    self.goto[state][character] = following
                    self.goto.append({})
                    self.match.append(-1)
                    depth.append(depth[state] + 1)
                state = following
            if self.match[state] < 0:
                self.match[state] = index
        self.fail = [0] * len(self.goto)
        self.hold = [0] * len(self.goto)
        queue = list(self.goto[0].values())
        for state in queue:  # breadth first, so that the state a failure leads to is complete
            fallback = self.fail[state]
            self.hold[state] = depth[state] if self.goto[state] else self.hold[fallback]
            if self.match[state] < 0:
                self.match[state] = self.match[fallback]
            for character, following in self.goto[state].items():
                self.fail[following] = self.step(fallback, character)
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            following = self.goto[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class StopMatcher:
    """Lets text through up to the first stop string to be complete; of two that end together the longer one counts.

    Which one is found does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_stop_string: bool) -> None:
        self._stops = stops
        self._include = include_stop_string
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """What of the text so far may be released now. A string that is complete while not `armed` is plain text."""
        stops, state = self._stops, self._state
        for index, character in enumerate(text):
            state = stops.step(state, character)
            if armed and stops.match[state] >= 0:
                self.matched = stops.strings[stops.match[state]]
                until = self._held + text[: index + 1]
                self._held = ""
                return until if self._include else until[: len(until) - len(self.matched)]
        self._state = state
        text = self._held + text
        cut = len(text) - stops.hold[state]
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class StopMatch:
    """A stop string was found: which, and how many tokens it took."""

    string: str
    num_tokens: int


class AnswerText:
    """The text of one answer as its tokens arrive. After `match` is set nothing more may be pushed.

    `silent_ids` (stop tokens) have no text. Stop strings count once `min_tokens` tokens are there.
    """

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "_num_tokens", "_silent_ids", "match")

    def __init__(
        self,
        pieces: Pieces,
        *,
        stops: StopStrings | None = None,
        include_stop_string: bool = False,
        min_tokens: int = 0,
        silent_ids: frozenset[int] = frozenset(),
        keep_special: bool = False,
    ) -> None:
        self._decoder = IncrementalDecoder(pieces, keep_special=keep_special)
        self._matcher = StopMatcher(stops, include_stop_string=include_stop_string) if stops is not None else None
        self._min_tokens = min_tokens
        self._silent_ids = silent_ids
        self._num_tokens = 0
        self.match: StopMatch | None = None

    def push(self, token_id: int) -> str:
        """The text that one more token releases."""
        self._num_tokens += 1
        text = "" if token_id in self._silent_ids else self._decoder.push(token_id)
        return text if self._matcher is None else self._release(text)

    def finish(self) -> str:
        """The rest of the text: the answer has no more tokens. May still find a stop string."""
        text = self._release(self._decoder.flush())
        return text if self._matcher is None or self.match is not None else text + self._matcher.flush()

    def _release(self, text: str) -> str:
        if self._matcher is None:
            return text
        assert self.match is None, "text after its end"
        released = self._matcher.push(text, armed=self._num_tokens >= self._min_tokens)
        if self._matcher.matched is not None:
            self.match = StopMatch(self._matcher.matched, self._num_tokens)
        return released
