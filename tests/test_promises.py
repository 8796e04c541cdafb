"""Each promise of the pages has a test, listed in tests/promises.yaml."""

from __future__ import annotations

import re

import pytest
from support.promises import entries, text_of, untraced
from test_faults import missing

from lineclear.scheduler.grpc_api.request_reader import MAX_INCOMPLETE
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.worker.model.verified_families import VERIFIED

ENTRIES = entries()
PAGES = ("README.md", "docs/reliability.md", "docs/security.md", "docs/protocol.md")


def test_entries_cover_the_pages() -> None:
    assert {entry.page for entry in ENTRIES} == set(PAGES)


def test_quotes_and_their_tests_exist() -> None:
    texts = {page: text_of(page) for page in PAGES}
    gone = [f"{entry.page}: {entry.quote}" for entry in ENTRIES if entry.quote not in texts[entry.page]]
    assert gone == [], "the page has changed: quote the new sentence"
    assert [entry.quote for entry in ENTRIES if not (entry.tests or entry.not_a_promise)] == []
    assert missing(test for entry in ENTRIES for test in entry.tests) == []


@pytest.mark.parametrize("page", PAGES)
def test_promises_are_traced(page: str) -> None:
    found = untraced(text_of(page), [entry.quote for entry in ENTRIES if entry.page == page])
    assert not found, "name the tests of these in tests/promises.yaml, or say why they promise nothing"


def test_untraced_promise_is_found() -> None:
    text = "It counts. It never stops. It stops at most once, in all.\0A table of cells\0only this"
    assert untraced(text, []) == ["It never stops.", "It stops at most once, in all.", "only this"]
    assert untraced(text, ["It never stops.", "only"]) == ["It stops at most once, in all."]
    assert untraced(text, ["once, in all", "It counts."]) == ["It never stops.", "only this"]


def test_defaults_match_settings() -> None:
    """As in "`max_sessions_per_connection` sessions (64)"."""
    words = {"1 MiB": float(1 << 20), "an hour": 3600.0}
    settings = SchedulerSettings()
    defaults = {**settings.model_dump(), "max_message_bytes": settings.max_request_bytes}
    named = {}
    for page in PAGES:
        for name, value in re.findall(r"`([a-z_]+)`(?: \w+)? \(([^);]+)", text_of(page)):
            if name in defaults:
                named[name] = words[value] if value in words else float(value)
    assert len(named) >= 3
    assert named == {name: defaults[name] for name in named}


def test_connection_figures_match_settings() -> None:
    settings, page = SchedulerSettings(), text_of("docs/security.md")
    spare = settings.max_streams - settings.max_queue_size - settings.max_batch_size
    assert f"{spare} more calls than can wait and run ({settings.max_streams:,})" in page
    most = 2 * MAX_INCOMPLETE * 2 * settings.max_request_bytes + settings.max_streams * (64 << 10)
    assert f"takes at most {-(-most // (1 << 20))} MiB of a connection" in page


def test_number_of_families_matches() -> None:
    assert f"The tests hold {len(VERIFIED)} model families to that." in text_of("README.md")
