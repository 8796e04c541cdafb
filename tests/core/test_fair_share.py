"""The order `fair` on an overloaded server."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from core.harness import CoreHarness, make_request

from lineclear.scheduler.core.dump import dump
from lineclear.scheduler.core.policies import FairShare, PolicySettings
from lineclear.scheduler.core.sequence import Sequence

SIZES = {"a": (4, 4), "b": (4, 20), "c": (30, 2)}  # prompt tokens, output tokens


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_waiting_tenants_differ_by_one_request_of_each(order: str) -> None:
    harness = CoreHarness(scheduling_policy="fair", max_batch_size=1)
    for tenant in order:
        for number in range(20):
            harness.submit(f"{tenant}{number}", *SIZES[tenant], tenant=tenant)
    harness.run()
    had, left = Counter[str](), Counter(dict.fromkeys(order, 20))
    for name in harness.started():
        if all(left.values()):
            had[name[0]] += sum(SIZES[name[0]])
            for one, other in combinations(order, 2):
                assert abs(had[one] - had[other]) <= sum(SIZES[one]) + sum(SIZES[other])
        left[name[0]] -= 1
    assert sum(had.values()) > 3 * 100  # the tenants waited at the same time


def accounts(order: FairShare, name: str) -> dict[str, Any]:
    return dict(dump(order)["FairShare"][name]["dict"])


def test_absent_tenants_are_forgotten() -> None:
    order = FairShare(PolicySettings())

    def arrive(number: int) -> Sequence:
        request = make_request(f"r{number}", 1, 1, tenant=f"t{number}")
        return Sequence(request, (order.key(request, 0.0, 0.0), number), 0.0)

    stays = arrive(-1)
    for number in range(5000):
        sequence = arrive(number)
        order.on_start(sequence)
        sequence.started_at = 0.0
        sequence.tokens.append(1)
        order.on_finish(sequence)
    assert list(accounts(order, "_present")) == ["t-1"]
    assert 0 < len(accounts(order, "_debtors")) <= 4096
    order.on_finish(stays)
    assert accounts(order, "_present") == accounts(order, "_debtors") == {}
