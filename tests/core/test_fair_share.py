"""The order `fair`: what tenants get of a server that has more to do than it can."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from core.harness import Rig, make_request

from lineclear.scheduler.core.fair_share import FairShare
from lineclear.scheduler.core.sequence import Sequence

SIZES = {"a": (4, 4), "b": (4, 20), "c": (30, 2)}  # prompt tokens, output tokens


def one_by_one(**more: object) -> Rig:
    return Rig(order="fair", max_batch_size=1, **more)


def ask(rig: Rig, tenant: str, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        prompt, output = SIZES[tenant]
        rig.submit(f"{tenant}{number}", prompt, output, tenant=tenant)


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_tenants_that_wait_get_the_same_but_for_one_request_of_each(order: str) -> None:
    rig = one_by_one()
    for tenant in order:
        ask(rig, tenant, 20)
    rig.run()
    had, left = Counter[str](), Counter(dict.fromkeys(order, 20))
    for name in rig.started():
        if all(left.values()):
            had[name[0]] += sum(SIZES[name[0]])
            for one in order:
                for other in order:
                    assert abs(had[one] - had[other]) <= sum(SIZES[one]) + sum(SIZES[other])
        left[name[0]] -= 1
    assert sum(had.values()) > 3 * 100  # they did wait together


def test_staying_away_earns_nothing() -> None:
    rig = one_by_one()
    ask(rig, "a", 30)
    while len(rig.started()) < 10:
        rig.step()
    before = len(rig.started())
    for number in range(10):
        rig.submit(f"d{number}", *SIZES["a"], tenant="d")
    rig.run()
    turns = [1 if name[0] == "d" else -1 for name in rig.started()[before : before + 20]]
    assert max(map(abs, accumulate(turns))) <= 2


def test_whoever_hangs_up_in_the_queue_gets_his_turn_back() -> None:
    rig = one_by_one()
    ask(rig, "a", 1)
    rig.step()
    ask(rig, "a", 10, first=1)
    for number in range(1, 11):
        rig.cancel(f"a{number}")
    ask(rig, "b", 3)
    ask(rig, "a", 1, first=11)
    rig.run()
    assert rig.started()[1:3] == ["b0", "a11"]


def test_what_was_not_used_is_given_back() -> None:
    rig = one_by_one()
    for number in range(6):
        rig.submit(f"careless{number}", 4, 200, tenant="a")
        rig.submit(f"exact{number}", 4, 2, tenant="b")
        rig.step()
        for name in ("careless", "exact"):
            rig.core.finish(f"{name}{number}", 1, rig.now)
    ask(rig, "b", 3)
    rig.submit("a", 4, 4, tenant="a")
    rig.run()
    assert "a" in rig.started()[:-2]


def test_a_tenants_own_requests_begin_as_they_came() -> None:
    rig = one_by_one()
    ask(rig, "b", 1)
    rig.step()
    ask(rig, "a", 6)
    for number in range(4):
        rig.cancel(f"a{number}")
    ask(rig, "a", 6, first=6)
    rig.run()
    assert [name for name in rig.started() if name[0] == "a"] == [f"a{number}" for number in range(4, 12)]


def test_tenants_who_are_gone_are_forgotten() -> None:
    order = FairShare(None)

    def arrive(number: int) -> Sequence:
        request = make_request(f"r{number}", 1, 1, tenant=f"t{number}")
        return Sequence(request, (order.key(request, 0.0), number), 0.0)

    stays = arrive(-1)
    for number in range(5000):
        sequence = arrive(number)
        order.on_start(sequence)
        sequence.started_at = 0.0
        sequence.tokens.append(1)
        order.on_finish(sequence)
    assert list(order.dump()["present"]) == ["t-1"]
    assert 0 < len(order.dump()["debtors"]) <= 4096
    order.on_finish(stays)
    assert order.dump() == {"clock": 0, "present": {}, "debtors": {}}
