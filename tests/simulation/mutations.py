"""Plants bugs in the core, each a small change of one function's source: planted.txt lists them.

A bug names the words it replaces, so that one that no longer applies is an error and not a silent pass.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineclear.scheduler.core import limits, policies, running_batch, scheduler
from lineclear.scheduler.core.block_pool import BlockPool
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.inflight_step import InflightStep, ResultTokens
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Bug:
    """In `owner.name`, `old` becomes `new`."""

    title: str
    owner: Any
    name: str
    old: str
    new: str


_OWNERS: dict[str, Any] = {
    **{
        cls.__name__: cls
        for cls in (
            BlockPool,
            RequestQueue,
            RunningBatch,
            PoisonDetector,
            DecodeBatch,
            StepPlanner,
            InflightStep,
            ResultTokens,
            Scheduler,
            Sequence,
        )
    },
    **{
        cls.__name__: cls
        for cls in (policies.BatchingState, *policies.STRATEGIES.values(), *policies.QUEUE_ORDERS.values())
        if isinstance(cls, type)
    },
    "core": scheduler,
    "door": limits,
    "policy": policies,
    "residents": running_batch,
}


def _read() -> Iterator[Bug]:
    text = Path(__file__).with_name("planted.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for title, where, old, new in zip(*[iter(lines)] * 4, strict=True):
        values = [
            line.removeprefix(f"    {word}").strip() for word, line in (("in", where), ("for", old), ("put", new))
        ]
        owner, _, name = values[0].rpartition(".")
        yield Bug(title, _OWNERS[owner], name, *values[1:])


BUGS = tuple(_read())


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The core, with `bug` in it."""
    original = inspect.getattr_static(bug.owner, bug.name)
    is_property = isinstance(original, property)
    function = original.fget if is_property else original
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.old) >= 1, f"{bug.title}: {bug.owner.__name__}.{bug.name} has no {bug.old!r}"
    source = source.replace(bug.old, bug.new).removeprefix("@property\n")
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(source, f"<planted: {bug.title}>", "exec", flags, dont_inherit=True), function.__globals__, scope)
    (changed,) = scope.values()
    replacement = property(changed) if is_property else changed
    with _everywhere(bug, original, replacement):
        yield


@contextmanager
def _everywhere(bug: Bug, original: Any, replacement: Any) -> Iterator[None]:
    """`replacement` in place of `original`, in the table of victims too."""
    names = [name for name, victim in policies.PREEMPTION_POLICIES.items() if victim is original]
    setattr(bug.owner, bug.name, replacement)
    policies.PREEMPTION_POLICIES.update(dict.fromkeys(names, replacement))
    try:
        yield
    finally:
        setattr(bug.owner, bug.name, original)
        policies.PREEMPTION_POLICIES.update(dict.fromkeys(names, original))
