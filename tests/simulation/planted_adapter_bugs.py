"""Bugs to plant in what concerns adapters. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, drop, never, off_by_one, replace

from lineclear.scheduler.core.adapters import AdapterTable
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request

_INDEX = "state.adapters.index(request.adapter)"

ADAPTER_BUGS = (
    Bug(
        "a prefix is shared across adapters",
        Request.cache_scope,
        replace("self.cache_salt + self.adapter", "self.cache_salt"),
    ),
    Bug(
        "a preempted request resumes without its adapter",
        StepPlanner._start,
        replace(_INDEX, f"0 if sequence.preemptions else {_INDEX}"),
    ),
    Bug(
        "a request of a lost worker continues without its adapter",
        StepPlanner._start,
        replace(_INDEX, f"0 if sequence.recoveries else {_INDEX}"),
    ),
    Bug("a slot names another adapter", StepPlanner._start, off_by_one(_INDEX)),
    Bug("the index of an adapter in use is given to another", AdapterTable.unload, never("num_uses", role="test")),
    Bug("an index is never free again", LiveRequests._free, drop("state.adapters.release(sequence.request.adapter)")),
    Bug("requests are not counted", LiveRequests.add, drop("self._state.adapters.acquire(sequence.request.adapter)")),
    Bug("an unloaded adapter that is in use takes requests", AdapterTable.unload, drop("self._unloading.add(key)")),
    Bug(
        "a request uses an adapter that is not loaded", Scheduler.submit, drop("state.adapters.check(request.adapter)")
    ),
    Bug("an adapter that is loaded again still goes", AdapterTable.load, drop("self._unloading.discard(key)")),
    Bug(
        "one adapter more than the limit is loaded",
        AdapterTable.load,
        replace("self._max_adapters + 1", "self._max_adapters + 2"),
    ),
    Bug(
        "an adapter that is loaded again gets another index",
        AdapterTable.load,
        replace("key not in self._indices", "True"),
    ),
)
