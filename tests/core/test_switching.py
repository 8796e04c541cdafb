"""Limits and policies that change while requests wait and run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from core.harness import CoreHarness, answer, make_request

from lineclear.scheduler.core.dump import dump_core, load_core
from lineclear.scheduler.flight_recorder.recorder import to_json_types


def switch(harness: CoreHarness, **changes: Any) -> None:
    harness.core.switch(replace(harness.core.limits, **changes), harness.now)
    harness.record([])  # checks the invariants


def test_waiting_requests_get_the_keys_of_their_arrival() -> None:
    """With `priority`, each second of waiting counts as a class, also the seconds before the switch."""
    harness = CoreHarness(max_batch_size=1, priority_aging_seconds=1.0)
    harness.submit("running", 4, 4)
    harness.step()
    for name, priority, second in (("a", 9, 0), ("b", 5, 1), ("c", 5, 2), ("d", 0, 20)):
        harness.now = float(second)
        harness.submit(name, 4, 2, priority=priority)
    switch(harness, scheduling_policy="priority")
    harness.run()
    assert harness.started() == ["running", "b", "c", "a", "d"]


def test_new_fair_order_begins_with_the_requests_that_run() -> None:
    harness = CoreHarness(max_batch_size=1)
    harness.submit("a0", 4, 4, tenant="a")
    harness.step()
    for name in ("a1", "a2", "b0", "b1"):
        harness.submit(name, 4, 4, tenant=name[0])
    switch(harness, scheduling_policy="fair")
    harness.run()
    assert harness.started() == ["a0", "b0", "a1", "b1", "a2"]


def test_other_weights_hold_for_requests_that_wait_and_that_arrive() -> None:
    harness = CoreHarness(max_batch_size=1, scheduling_policy="fair", share_weights={"b": 4.0})
    for number in range(8):
        for tenant in "ab":
            harness.submit(f"{tenant}{number}", 4, 4, tenant=tenant)
    switch(harness, policy=replace(harness.core.limits.policy, share_weights={"a": 4.0}))
    for number in range(8, 16):
        for tenant in "ab":
            harness.submit(f"{tenant}{number}", 4, 4, tenant=tenant)
    while len(harness.started()) < 15:
        harness.step()
    assert Counter(name[0] for name in harness.started()) == {"a": 12, "b": 3}


def test_limits_that_are_fixed_cannot_change() -> None:
    harness = CoreHarness()
    with pytest.raises(AssertionError):
        switch(harness, pipeline_depth=3)


def test_dump_and_load_keep_switched_limits() -> None:
    harness = CoreHarness(max_batch_size=1)
    harness.submit("a", 4, 4)
    switch(harness, scheduling_policy="shortest", max_batch_size=3)
    loaded = CoreHarness().core
    load_core(loaded, json.loads(json.dumps(to_json_types(dump_core(harness.core)))))
    assert replace(loaded.limits, cache_secret=harness.core.limits.cache_secret) == harness.core.limits
    assert to_json_types(dump_core(loaded)) == to_json_types(dump_core(harness.core))
    request = make_request("b", 4, 4)
    harness.record(harness.core.submit(request, harness.now))
    harness.run()
    assert harness.outputs("b") == answer(request)
