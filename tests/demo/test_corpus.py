"""The corpus of the demo model: repeatable, and entirely our own writing."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "demo"
sys.path.insert(0, str(DEMO))

from corpus import Document, documents, read_countries, read_topics  # noqa: E402


def _take(seed: int, count: int) -> list[Document]:
    return list(itertools.islice(documents(seed), count))


def _text(document: Document) -> str:
    return document if isinstance(document, str) else "\n".join(message["content"] for message in document)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]+", text.lower()))


def test_a_seed_always_tells_the_same_documents() -> None:
    assert _take(seed=7, count=300) == _take(seed=7, count=300)
    assert _take(seed=7, count=300) != _take(seed=8, count=300)


def test_every_word_comes_from_a_file_of_this_directory() -> None:
    files = [DEMO / "corpus.py", *(DEMO / "writing").iterdir()]
    ours = _words("\n".join(file.read_text(encoding="utf-8") for file in files))
    assert set().union(*(_words(_text(document)) for document in _take(seed=3, count=2000))) <= ours


def test_no_placeholder_is_left_in_a_document() -> None:
    assert not [text for text in map(_text, _take(seed=4, count=2000)) if re.search(r"[{}|$]|<\|", text)]


def test_turns_alternate_after_an_optional_system_message() -> None:
    for document in _take(seed=5, count=500):
        if isinstance(document, str):
            continue
        roles = [message["role"] for message in document]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)


def test_each_country_is_listed_once_with_a_capital() -> None:
    countries = read_countries()
    assert len({country.name for country in countries}) == len(countries) > 190
    assert all(country.capital and country.region for country in countries)


def test_the_long_subjects_are_written_out_at_length() -> None:
    for file_name in ("long_transformer.txt", "long_quantum.txt"):
        (topic,) = read_topics(file_name)
        assert sum(len(paragraph) for paragraph in topic.paragraphs) >= 30
        assert all(len(slot) >= 2 for paragraph in topic.paragraphs for slot in paragraph)
