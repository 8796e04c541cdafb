"""Incremental decoding and stop strings: the released texts joined are the text of all tokens up to the stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lineclear.scheduler.text.detokenizer import AnswerText, IncrementalDecoder, decode
from lineclear.scheduler.text.stop_strings import StopMatcher, StopStrings
from lineclear.scheduler.text.tokenizer import REPLACE_EACH

SPECIAL = 999


class Bytes:
    """Token i is the i-th of a list of byte strings; SPECIAL is special. The first piece loses a leading space."""

    def __init__(self, table: Sequence[bytes], errors: str = "replace", strips: bool = False) -> None:
        self.table, self.errors, self.strips = table, errors, strips
        self.known: dict[bool, dict[int, str]] = {True: {}, False: {}}

    def piece(self, token_id: int, *, first: bool) -> bytes | None:
        if token_id == SPECIAL:
            return b"<s>"
        if token_id >= len(self.table):
            return None
        piece = self.table[token_id]
        return piece[1:] if first and self.strips and piece.startswith(b" ") else piece

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL


EVERY_BYTE = Bytes([bytes([b]) for b in range(256)])


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return start and text of the match that completes first; the longest of those that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


@given(st.binary(max_size=40))
@example("é€😀".encode()[:-1])
@example(b"\xf0\x9f\x98")
@example(b"\xed\xa0\x80")
def test_single_bytes_decode_as_the_whole(data: bytes) -> None:
    assert decode(EVERY_BYTE, data, keep_special=False) == data.decode("utf-8", "replace")


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=12))
def test_token_boundaries_do_not_change_the_text(pieces: list[bytes]) -> None:
    decoder = IncrementalDecoder(Bytes(pieces), keep_special=False)
    parts = [decoder.push(i) for i in range(len(pieces))]
    assert "".join(parts) + decoder.flush() == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_characters_are_released_when_complete(text: str) -> None:
    decoder = IncrementalDecoder(EVERY_BYTE, keep_special=False)
    data = text.encode()
    sent = ""
    for index, byte in enumerate(data):
        sent += decoder.push(byte)
        held = data[len(sent.encode()) : index + 1]
        assert text.startswith(sent)
        assert len(held) <= 3
    assert sent == text


def test_byte_fallback_replaces_each_bad_byte() -> None:
    each = Bytes([b"\xe5", b"\x85", b"a"], REPLACE_EACH)
    assert decode(each, [0, 1, 2], keep_special=False) == "\ufffd\ufffda"
    assert decode(each, [2, 0, 1], keep_special=False) == "a\ufffd\ufffd"


def test_only_the_first_token_with_text_loses_its_space() -> None:
    pieces = Bytes([b" a", b" b"], strips=True)
    assert decode(pieces, [SPECIAL, 5, 0, 1], keep_special=False) == "a b"
    assert decode(pieces, [SPECIAL, 0, 1], keep_special=True) == "<s> a b"


def test_special_tokens_inside_a_character_are_skipped() -> None:
    assert decode(Bytes([b"\xc3", b"\xa9"]), [0, SPECIAL, 1], keep_special=False) == "é"


def test_each_token_is_decoded_once() -> None:
    """A decoder that decodes unfinished text again would ask for the same tokens repeatedly."""
    num_calls = 0

    class Counting(Bytes):
        def piece(self, token_id: int, *, first: bool) -> bytes | None:
            nonlocal num_calls
            num_calls += 1
            return super().piece(token_id, first=first)

    decoder = IncrementalDecoder(Counting([b"\xf0", b"a", b"\x9f"]), keep_special=False)
    for n in range(3000):
        decoder.push(n % 3 if n > 1500 else 0)
    assert 1000 < num_calls <= 3000  # fewer because texts are cached


FEW = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=200)
@example(text="xabcdef", stops=["abcdef", "cd"], cuts=[], include=False)
@example(text="abcd", stops=["d", "bcd"], cuts=[], include=False)
@example(text="a STO", stops=["STOP"], cuts=[], include=False)
@example(text="a</x\nb", stops=["</s>", "\n\n"], cuts=[2, 3, 5], include=False)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(FEW, min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_released_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop_string=include)
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    expected = first_stop(text, stops)
    until = text if expected is None else text[: expected[0]] + (expected[1] if include else "")
    released = ""
    for begin, end in pairwise(bounds):
        released += matcher.push(text[begin:end])
        if matcher.matched is not None:
            break
        held = text[len(released) : end]
        # Released text is final, and only a prefix of a stop string is held back.
        assert until.startswith(released)
        assert held == "" or any(stop.startswith(held) for stop in stops)
    if matcher.matched is None:
        released += matcher.flush()
    assert released == until
    assert matcher.matched == (None if expected is None else expected[1])


PIECES = [b"a", b"b", b"ab", b" c", b"\xc3", b"\xa9", b"ba", b"\n"]


@settings(max_examples=200)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    stops=st.lists(st.sampled_from(["ab", "ba", "a c", "é", "bb\n", "\ufffd", "aab"]), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_answer_text_ends_at_the_stop_string(ids: list[int], stops: list[str], include: bool) -> None:
    pieces = Bytes(PIECES)
    answer = AnswerText(pieces, stops=StopStrings(stops), include_stop_string=include)
    text, used = "", 0
    for token_id in ids:
        text, used = text + answer.push(token_id), used + 1
        if answer.match is not None:
            break
    else:
        text += answer.finish()
    whole = decode(pieces, ids, keep_special=False)
    expected = first_stop(whole, stops)
    if expected is None:
        assert (text, answer.match) == (whole, None)
        return
    start, stop = expected
    assert text == whole[:start] + (stop if include else "")
    assert answer.match is not None
    assert answer.match.string == stop
    assert answer.match.num_tokens == used
    # Without its last token the text has no stop string.
    before = IncrementalDecoder(pieces, keep_special=False)
    shorter = "".join(before.push(i) for i in ids[: used - 1])
    assert used == len(ids) or first_stop(shorter, stops) is None


def test_stop_string_before_min_tokens_is_text() -> None:
    answer = AnswerText(Bytes([b"x", b"STOP", b"y"]), stops=StopStrings(["STOP"]), min_tokens=3)
    assert [answer.push(0), answer.push(1), answer.push(2)] == ["x", "STOP", "y"]
    assert answer.push(1) == ""
    assert answer.match is not None
    assert answer.match.num_tokens == 4


@pytest.mark.parametrize(("pieces", "stop"), [([b"ST", b"OP"], "STOP"), ([b"S", b"T"], "ST")])
def test_stop_string_started_before_min_tokens_matches(pieces: list[bytes], stop: str) -> None:
    answer = AnswerText(Bytes(pieces), stops=StopStrings([stop]), min_tokens=2)
    assert [answer.push(0), answer.push(1)] == ["", ""]
    assert answer.match is not None


def test_stop_tokens_have_no_text() -> None:
    answer = AnswerText(Bytes([b"x", b"END"]), silent_ids=frozenset({1}))
    assert answer.push(0) + answer.push(1) + answer.finish() == "x"


def test_early_stop_string_does_not_match_after_min_tokens() -> None:
    """The text "ab" is held back as a prefix of "abc" although it was completed too early to match."""
    matcher = StopMatcher(StopStrings(["ab", "abc"]), include_stop_string=True)
    assert matcher.push("xab", armed=False) == "x"
    assert matcher.push("c") == "abc"
    assert matcher.matched == "abc"


def test_suffix_lookups_are_bounded() -> None:
    """A piece costs at most one lookup for each character of the longest stop string."""
    lookups = 0

    class Counting(frozenset[str]):
        def __contains__(self, item: object) -> bool:
            nonlocal lookups
            lookups += 1
            return super().__contains__(item)

    stops = StopStrings(["a" * 63 + "b", "ab" * 32])
    stops.prefixes = Counting(stops.prefixes)
    matcher = StopMatcher(stops, include_stop_string=False)
    assert [len(matcher.push("c" + "b" * 200)) for _ in range(20)] == [201] * 20
    assert lookups == 20 * 63
