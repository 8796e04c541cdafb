"""Which tests are slow or exhaustive, and fixtures that keep one test from slowing down or ending the others."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from support.slow_tests import EXHAUSTIVE, SLOW, TESTS

# The tests are those of the client for threads that belongs to the sources.
runpy.run_path(str(Path(__file__).parents[1] / "client/generate_sources.py"))["main"]()

_configure_logging = structlog.configure


def _configure_without_cache(**options: Any) -> None:
    """Keep no logger as it was at its first use: a test that reads log lines would miss those of such a logger."""
    _configure_logging(**options | {"cache_logger_on_first_use": False})


structlog.configure = _configure_without_cache

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a run of the slow tests, import no file without one."""
    if not config.option.markexpr.startswith("slow") or collection_path.suffix != ".py":
        return None
    path = str(collection_path.relative_to(TESTS))
    return None if path.startswith(tuple(name.partition("::")[0] for name in SLOW)) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in SLOW and EXHAUSTIVE, and put files of few tests first.

    Those are the ones that start processes. Behind all others, a single long file would run while the other test
    processes have nothing left: the longest ones of many tests are the first.
    """
    num_tests = Counter(item.path for item in items)
    for file in ("campaigns/test_model_samples.py", "campaigns/test_samples.py", "e2e/test_families.py"):
        num_tests[TESTS / file] = 0
    items.sort(key=lambda item: num_tests[item.path])
    for item in items:
        path = item.path.relative_to(TESTS)
        functions = {f"{path}::{name}" for name in (item.name, getattr(item, "originalname", item.name))}
        names = {str(path), *map(str, path.parents), *functions}
        if names & set(SLOW):
            item.add_marker(pytest.mark.slow)
        callspec = getattr(item, "callspec", None)
        if callspec is not None and EXHAUSTIVE.get(str(path), set()) & set(callspec.id.split("-")):
            item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Torch computes with as many threads after a test as before it.

    A worker that starts takes all cores, and torch has one number for the whole process. Where test processes run side
    by side, each of its operations would from then on wait for threads that have no core: twenty times the processor
    time has been seen.
    """
    torch = sys.modules.get("torch")
    num_threads = None if torch is None else torch.get_num_threads()
    try:
        return (yield)
    finally:
        if torch is not None:
            torch.set_num_threads(num_threads)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory whose sockets have short paths, unlike those of tmp_path."""
    with tempfile.TemporaryDirectory(prefix="lc") as path:
        yield Path(path)


_kill = os.kill


def _kill_one(pid: int, number: int) -> None:
    """Refuse pid 0 and negative ones: such a signal ends the whole run, as SIGKILL without a line of output."""
    assert pid > 0, f"a signal to pid {pid} goes to a whole process group"
    _kill(pid, number)


os.kill = _kill_one
