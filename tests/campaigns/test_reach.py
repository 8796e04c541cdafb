"""Which tests a mutant of a block runs."""

from __future__ import annotations

import builtins
import textwrap
from typing import Any

import pytest
from campaigns.reach import Reach, place_of, with_probes

SOURCE = textwrap.dedent('''
    """A module."""
    LIMIT = 3

    def clamp(number):
        """Return at most LIMIT."""
        if number > LIMIT:
            return LIMIT
        elif number < 0:
            number = -number
        for _ in range(2):
            number += 1
        return number
''')


def executed(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    places: list[str] = []
    monkeypatch.setattr(builtins, "_probe", places.append, raising=False)
    namespace: dict[str, Any] = {}
    exec(with_probes(SOURCE, "m"), namespace)
    namespace["clamp"](number)
    return list(dict.fromkeys(places))


def test_each_block_has_a_place_that_only_its_callers_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert executed(monkeypatch, 5) == ["m:7", "m:8"]
    assert executed(monkeypatch, 1) == ["m:7", "m:9", "m:11", "m:12", "m:13"]
    assert executed(monkeypatch, -1) == ["m:7", "m:9", "m:10", "m:11", "m:12", "m:13"]


def test_line_belongs_to_its_innermost_block() -> None:
    lines = {line: place_of(SOURCE, "m", line) for line in (3, 7, 8, 9, 10, 11, 12, 13)}
    assert lines == {line: "" if line == 3 else f"m:{line}" for line in lines}


def test_tests_of_a_block_are_those_that_execute_it_and_those_that_share_a_process() -> None:
    seconds = {"a/test_x.py::one": 3.0, "a/test_x.py::two": 1.0, "a/test_y.py::one": 1.0, "b/test_z.py::one": 1.0}
    places = {"m:7": ["a/test_x.py", "a/test_y.py::one", "b/test_z.py::one"], "m:8": ["a/test_x.py::two"]}
    reach = Reach("", {}, seconds, places)
    assert reach.tests("m:7", ["a"]) == {
        "a/test_y.py": ["a/test_y.py::one"],
        "a/test_x.py": ["a/test_x.py::one", "a/test_x.py::two"],
    }
    assert reach.tests("m:8", ["a", "b"]) == {"a/test_x.py": ["a/test_x.py::two"]}
    assert reach.tests("m:9", ["a"]) == {}
