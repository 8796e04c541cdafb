"""The corpus of the demo model is repeatable and written in this repository."""

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


def test_seed_determines_the_documents() -> None:
    assert _take(seed=7, count=300) == _take(seed=7, count=300)
    assert _take(seed=7, count=300) != _take(seed=8, count=300)


def test_words_come_from_the_writing_directory() -> None:
    files = [DEMO / "corpus.py", *(DEMO / "writing").iterdir()]
    ours = _words("\n".join(file.read_text(encoding="utf-8") for file in files))
    assert set().union(*(_words(_text(document)) for document in _take(seed=3, count=2000))) <= ours


def test_documents_have_no_placeholders() -> None:
    assert not [text for text in map(_text, _take(seed=4, count=2000)) if re.search(r"[{}|$]|<\|", text)]


def test_chat_roles_alternate() -> None:
    for document in _take(seed=5, count=500):
        if isinstance(document, str):
            continue
        roles = [message["role"] for message in document]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)


def test_countries_are_unique() -> None:
    countries = read_countries()
    assert len({country.name for country in countries}) == len(countries) > 190
    assert all(country.capital and country.region for country in countries)


def test_long_subjects_are_long() -> None:
    for file_name in ("long_transformer.txt", "long_quantum.txt"):
        (topic,) = read_topics(file_name)
        assert sum(len(paragraph) for paragraph in topic.paragraphs) >= 30
        assert all(len(slot) >= 2 for paragraph in topic.paragraphs for slot in paragraph)
