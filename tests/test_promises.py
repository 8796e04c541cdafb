"""Every promise of the pages is traced to a test that holds it, in tests/promises.yaml."""

from __future__ import annotations

import re

import pytest
from support.promises import Entry, entries, text_of, untraced
from support.sources import REPOSITORY
from test_faults import functions

from lineclear.scheduler.settings import SchedulerSettings
from lineclear.worker.model.verified_families import VERIFIED

ENTRIES = entries()
PAGES = ("README.md", "docs/reliability.md", "docs/security.md", "docs/protocol.md")
TESTS = REPOSITORY / "tests"


def test_the_pages_are_those_with_promises() -> None:
    assert {entry.page for entry in ENTRIES} == set(PAGES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.page}: {entry.quote[:50]}")
def test_what_is_quoted_is_on_its_page_and_its_tests_exist(entry: Entry) -> None:
    assert entry.quote in text_of(entry.page), "the page says something else now: trace the new sentence"
    assert entry.tests or entry.not_a_promise
    for test in entry.tests:
        file, _, name = test.partition("::")
        assert name in functions(TESTS / file), f"{test} does not exist, or is switched off"


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_with_a_word_of_promise_is_traced(page: str) -> None:
    found = untraced(text_of(page), [entry.quote for entry in ENTRIES if entry.page == page])
    assert not found, "name the tests of these in tests/promises.yaml, or say why they promise nothing"


def test_an_untraced_promise_is_found() -> None:
    text = "It counts. It never stops. It stops at most once, in all.\0A table of cells\0only this"
    assert untraced(text, []) == ["It never stops.", "It stops at most once, in all.", "only this"]
    assert untraced(text, ["It never stops.", "only"]) == ["It stops at most once, in all."]
    assert untraced(text, ["once, in all", "It counts."]) == ["It never stops.", "only this"]


def test_a_default_beside_the_name_of_a_setting_is_the_default() -> None:
    """As in "`max_unfinished_per_connection` (16)"."""
    words = {"1 MiB": float(1 << 20), "an hour": 3600.0}
    settings = SchedulerSettings()
    in_force = {**settings.model_dump(), "max_message_bytes": settings.max_request_bytes}
    said = {}
    for page in PAGES:
        for name, value in re.findall(r"`([a-z_]+)`(?: \w+)? \(([^);]+)", text_of(page)):
            if name in in_force:
                said[name] = words[value] if value in words else float(value)
    assert len(said) >= 4
    assert said == {name: in_force[name] for name in said}


def test_the_figures_of_a_connection_follow_from_the_defaults() -> None:
    settings, page = SchedulerSettings(), text_of("docs/security.md")
    unfinished = settings.max_unfinished_per_connection
    spare = settings.max_streams - settings.max_queue_size - settings.max_batch_size
    assert f"{spare} more calls than can wait and run ({settings.max_streams:,})" in page
    most = 2 * unfinished * 2 * settings.max_request_bytes + settings.max_streams * (64 << 10)
    assert f"takes at most {-(-most // (1 << 20))} MiB of a connection" in page


def test_the_number_of_families_is_that_of_the_tests() -> None:
    """End-to-end tests compare each of them with transformers."""
    assert f"The tests hold {len(VERIFIED)} model families to that." in text_of("README.md")
