"""A stop regex: the match that ends first ends the answer, however its text is cut, in bounded time."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.serving import TOKENIZER, Serving, error_of, read_all, serving, text_of, text_request, tokens_of

from lineclear.errors import InvalidRequest
from lineclear.scheduler.text.stop_regex import MAX_MATCH, BadPattern, RegexMatcher, StopRegex
from lineclear.v1 import inference_pb2 as pb

atoms = st.sampled_from(
    ["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", r"[\d.]", r"\.", "[a-b]", "[]a]", "[^]a]", "é"]
)
repetitions = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, repetitions).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
texts = st.text(alphabet="abc1.\né", max_size=16)


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """Return [start, end) of the match that ends first, the longest of these, by trying all."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return start, end
    return None


def pushed(matcher: RegexMatcher, pieces: list[str]) -> str:
    released = ""
    for piece in pieces:
        released += matcher.push(piece)
        if matcher.matched is not None:
            return released
    return released + matcher.flush()


@settings(max_examples=600, deadline=None)
@example(pattern="a{1,2}b", text="aab", cuts=[2], includes=False)
@example(pattern="(?:a|ba)1?b", text="baab ba1b", cuts=[1, 3], includes=True)
@example(pattern="[]a]", text="b]", cuts=[], includes=True)
@given(pattern=patterns, text=texts, cuts=st.lists(st.integers(0, 16), max_size=6), includes=st.booleans())
def test_first_match_ends_the_text_however_it_is_cut(pattern: str, text: str, cuts: list[int], includes: bool) -> None:
    if re.fullmatch(pattern, ""):
        with pytest.raises(BadPattern, match="matches the empty text"):
            StopRegex(pattern)
        return
    regex = StopRegex(pattern)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    matcher = regex.matcher(include_stop_string=includes)
    released = pushed(matcher, pieces)
    found = first_match(pattern, text)
    if found is None:
        assert (released, matcher.matched) == (text, None)
    else:
        start, end = found
        assert (released, matcher.matched) == (text[: end if includes else start], text[start:end])


def test_only_text_that_may_match_is_held_back() -> None:
    matcher = StopRegex(r"\n+(?:User|Human):").matcher(include_stop_string=False)
    said = ["Hi", "\n", "\nUs", "e it.\n", "Hum", "an: x"]
    assert [matcher.push(piece) for piece in said] == ["Hi", "", "", "\n\nUse it.", "", ""]
    assert matcher.matched == "\nHuman:"


def test_match_has_a_longest_length() -> None:
    matcher = StopRegex("<[^>]+>").matcher(include_stop_string=False)
    assert matcher.push("<" + "x" * (MAX_MATCH - 1)) == ""
    assert matcher.push("x") == "<" + "x" * MAX_MATCH
    assert pushed(matcher, [">", "<b>"]) == ">"
    assert matcher.matched == "<b>"


def test_match_before_min_tokens_does_not_count() -> None:
    matcher = StopRegex("a+b?").matcher(include_stop_string=False)
    assert matcher.push("xa", armed=False) + matcher.push("a", armed=False) == "x"
    assert matcher.push("b") == ""
    assert matcher.matched == "aab"


REFUSED = {
    "": "1 to 256 bytes",
    "é" * 129: "1 to 256 bytes",
    "a*": "matches the empty text",
    "()": "matches the empty text",
    "^a": "unsupported",
    "a$": "unsupported",
    r"\ba": "unsupported escape",
    r"\pL": "unsupported escape",
    "(?i)a": "flags",
    "(?=a)b": "look-around",
    "(?P<n>a)": "name",
    "a*?": "lazy",
    "a**": "repetition",
    "a{,3}": "brace",
    "a{3,2}": "number of repetitions",
    "a{49}": "number of repetitions",
    "(a{40}){40}": "more than 48 characters",
    "(?:a?){40}b": "transitions",
    "((((((((((((){48}){48}){48}){48}){48}){48}){48}){48}){48}){48}){48})a": "too many repetitions",
    "(" * 20 + "a" + ")" * 20: "nested",
    "(a": "without a closing",
    "a)": "without an opening",
    "[a": "too early",
    "[z-a]": "range",
    "[[:alpha:]]": "unsupported set",
    "a\\": "too early",
}


@pytest.mark.parametrize("pattern", REFUSED)
async def test_unsupported_pattern_is_refused_by_name(s: Serving, pattern: str) -> None:
    error = await error_of(s.generate(text_request(stop={"regex": pattern})))
    assert isinstance(error, InvalidRequest)
    assert [violation.field for violation in error.violations] == ["stop.regex"]
    assert REFUSED[pattern] in error.violations[0].description


async def test_answer_ends_before_the_match(tmp_path: Path) -> None:
    ids = TOKENIZER.encode_sealed("Hello, how are you today? I am fine.")
    async with serving(tmp_path) as s:
        s.engine.answer = lambda _: ids
        for includes, text in ((False, "Hello, how "), (True, "Hello, how are y")):
            stop = {"regex": r"a[a-z]+ \w", "include_stop_string": includes}
            whole = await read_all(s.generate(text_request(stop=stop)))
            assert text_of(whole) == text
            assert whole[-1].finished.finish_reason == pb.FINISH_REASON_STOP_STRING
            assert whole[-1].finished.matched_stop_string == "are y"
            assert len(tokens_of(whole)) < len(ids)
        both = await error_of(s.generate(text_request(stop={"regex": "a", "strings": ["b"]})))
        assert isinstance(both, InvalidRequest)
        assert [violation.field for violation in both.violations] == ["stop.regex"]


@pytest.mark.parametrize(
    "pattern", ["[^z]{8,16}z{9}", "(.?.?.?.?.?.?.?.?.?.?.?)z", r"(\w*\s*)*z", "(a|a|a|a|a|a|a|a|a)+z"]
)
def test_a_character_costs_one_lookup_for_each_position(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 0
    after = StopRegex.after

    def counted(self: StopRegex, position: int, char: str) -> tuple[int, ...]:
        nonlocal lookups
        lookups += 1
        return after(self, position, char)

    matcher = RegexMatcher(StopRegex(pattern), include_stop_string=False)
    monkeypatch.setattr(StopRegex, "after", counted)
    rng = random.Random(1)
    for _ in range(500):
        lookups = 0
        matcher.push("".join(rng.choice("abc d") for _ in range(4)))
        assert lookups <= 4 * (48 + 1)
