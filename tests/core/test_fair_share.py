"""The order `fair` on an overloaded server."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
from core.harness import CoreHarness, make_request

from lineclear.scheduler.core.dump import dump
from lineclear.scheduler.core.events import Finished
from lineclear.scheduler.core.fair_share import FairShare
from lineclear.scheduler.core.sequence import Request, Sequence
from lineclear.wire.messages import Pooling, PoolingKind

SIZES = {"a": (4, 4), "b": (4, 20), "c": (30, 2)}  # prompt tokens, output tokens


def one_by_one(**more: object) -> CoreHarness:
    return CoreHarness(scheduling_policy="fair", max_batch_size=1, **more)


def ask(harness: CoreHarness, tenant: str, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        prompt, output = SIZES[tenant]
        harness.submit(f"{tenant}{number}", prompt, output, tenant=tenant)


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_waiting_tenants_differ_by_one_request_of_each(order: str) -> None:
    harness = one_by_one()
    for tenant in order:
        ask(harness, tenant, 20)
    harness.run()
    had, left = Counter[str](), Counter(dict.fromkeys(order, 20))
    for name in harness.started():
        if all(left.values()):
            had[name[0]] += sum(SIZES[name[0]])
            for one in order:
                for other in order:
                    assert abs(had[one] - had[other]) <= sum(SIZES[one]) + sum(SIZES[other])
        left[name[0]] -= 1
    assert sum(had.values()) > 3 * 100  # the tenants waited at the same time


def test_idle_tenant_earns_nothing() -> None:
    harness = one_by_one()
    ask(harness, "a", 30)
    while len(harness.started()) < 10:
        harness.step()
    before = len(harness.started())
    for number in range(10):
        harness.submit(f"d{number}", *SIZES["a"], tenant="d")
    harness.run()
    turns = [1 if name[0] == "d" else -1 for name in harness.started()[before : before + 20]]
    assert max(map(abs, accumulate(turns))) <= 2


def charged(order: FairShare, tenant: str = "a") -> float:
    """Return the tokens that a tenant with a live request is charged with."""
    return float(accounts(order, "_present")[tenant]["_Account"][0])


def accounts(order: FairShare, name: str) -> dict[str, Any]:
    return dict(dump(order)["FairShare"][name]["dict"])


def beam_step(step: int) -> list[Request]:
    """Return the requests of three beams behind `step` tokens of a search whose prompt has 20."""
    return [
        make_request(
            f"beam {step} {beam}",
            20,
            step + 1,
            output=(1,) * step,
            expected_tokens=step + 1,
            tenant="a",
            is_sibling=step + beam > 0,
            queued_since=0.0,
        )
        for beam in range(3 if step else 1)
    ]


def run_through(order: FairShare, request: Request, number: int) -> None:
    """Queue, start and end a request that makes all its tokens."""
    sequence = Sequence(request, (order.key(request, 0.0, 0.0), number), 0.0)
    order.on_start(sequence)
    sequence.started_at = 0.0
    sequence.tokens += [1] * (request.max_tokens - len(request.output))
    order.on_finish(sequence)


def test_outputs_are_charged_with_their_prompt_once() -> None:
    order = FairShare({})
    requests = [make_request(f"a{n}", 20, 6, tenant="a", is_sibling=n > 0) for n in range(4)]
    sequences = [Sequence(x, (order.key(x, 0.0, 0.0), n), 0.0) for n, x in enumerate(requests)]
    assert charged(order) == 20 + 4 * 6
    order.on_finish(sequences[3])
    assert charged(order) == 20 + 3 * 6, "cancelled in the queue"
    order.on_start(sequences[1])
    sequences[1].started_at = 0.0
    sequences[1].tokens += [1, 1]
    order.on_finish(sequences[1])
    assert charged(order) == 20 + 2 * 6 + 2


def test_parts_of_a_call_are_charged_with_their_prompts() -> None:
    order = FairShare({})
    pooling = Pooling(PoolingKind.LAST)
    for number in range(3):
        part = make_request(f"a{number}", 20, 0, tenant="a", is_sibling=number > 0, pooling=pooling)
        order.key(part, 0.0, 0.0)
    assert charged(order) == 3 * 20


def test_steps_of_a_beam_search_are_charged_like_one_request() -> None:
    order = FairShare({})
    order.key(make_request("lives", 2, 60, tenant="a"), 0.0, 0.0)
    for step in range(5):
        for beam, request in enumerate(beam_step(step)):
            run_through(order, request, 3 * step + beam)
    assert charged(order) == 62 + 20 + 1 + 4 * 3


def test_beams_keep_the_place_of_the_first_step() -> None:
    """A search is one request that runs. The requests behind it wait, those of its tenant too."""
    harness = one_by_one()
    waiting = beam_step(0)
    for request in waiting:
        harness.record(harness.core.submit(request, 0.0))
    for tenant in "ab":
        for number in range(6):
            harness.submit(f"{tenant}{number}", 4, 4, tenant=tenant)
    for step in range(1, 5):
        while not all(
            any(e.request_id == x.request_id for e in harness.events if isinstance(e, Finished)) for x in waiting
        ):
            harness.step()
        waiting = beam_step(step)
        for request in waiting:
            harness.record(harness.core.submit(request, 0.0))
    harness.run()
    # One waiting request starts in each step whose last row is planned, before the next step is submitted.
    assert [name.split()[0] for name in harness.started()[: 13 + 4]].count("beam") == 13, harness.started()


def test_cancelled_waiting_request_is_credited() -> None:
    harness = one_by_one()
    ask(harness, "a", 1)
    harness.step()
    ask(harness, "a", 10, first=1)
    for number in range(1, 11):
        harness.cancel(f"a{number}")
    ask(harness, "b", 3)
    ask(harness, "a", 1, first=11)
    harness.run()
    assert harness.started()[1:3] == ["b0", "a11"]


def test_unused_tokens_are_credited() -> None:
    harness = one_by_one()
    for number in range(6):
        harness.submit(f"careless{number}", 4, 200, tenant="a")
        harness.submit(f"exact{number}", 4, 2, tenant="b")
        harness.step()
        for name in ("careless", "exact"):
            harness.core.finish_at_stop_string(f"{name}{number}", 1, harness.now)
    ask(harness, "b", 3)
    harness.submit("a", 4, 4, tenant="a")
    harness.run()
    assert "a" in harness.started()[:-2]


def test_requests_of_a_tenant_start_in_order() -> None:
    harness = one_by_one()
    ask(harness, "b", 1)
    harness.step()
    ask(harness, "a", 6)
    for number in range(4):
        harness.cancel(f"a{number}")
    ask(harness, "a", 6, first=6)
    harness.run()
    assert [name for name in harness.started() if name[0] == "a"] == [f"a{number}" for number in range(4, 12)]


def test_absent_tenants_are_forgotten() -> None:
    order = FairShare({})

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


def test_tokens_beyond_the_expected_ones_are_charged_at_the_end() -> None:
    """Both tenants always have two requests; "a" expects one token where it takes eight."""
    harness = one_by_one()
    expected, submitted = {"a": 1, "b": 8}, Counter[str]()
    while sum(submitted.values()) < 60:
        ended = Counter(e.request_id[0] for e in harness.events if isinstance(e, Finished))
        for tenant in expected:
            while submitted[tenant] < ended[tenant] + 2:
                name = f"{tenant}{submitted[tenant]}"
                harness.submit(name, 4, 8, tenant=tenant, expected_tokens=expected[tenant])
                submitted[tenant] += 1
        harness.step()
    assert abs(submitted["a"] - submitted["b"]) <= 2


def test_shares_follow_expected_tokens_while_they_are_right() -> None:
    """Tenant "a" allows a hundred tokens and expects four, so its requests cost as little as those of "b"."""
    harness = one_by_one()
    for number in range(10):
        harness.submit(f"a{number}", 4, 100, tenant="a", expected_tokens=4, seed=number)
        harness.submit(f"b{number}", 4, 4, tenant="b")
    names = []
    while len(names) < 12:
        harness.step()
        if len(harness.started()) > len(names):
            names = harness.started()
            harness.core.finish_at_stop_string(names[-1], 1, harness.now)
    assert Counter(name[0] for name in names) == {"a": 6, "b": 6}


def test_weights_divide_the_tokens() -> None:
    harness = one_by_one(share_weights={"a": 4.0, "b": 0.5})
    for number in range(40):
        for tenant in "abc":
            harness.submit(f"{tenant}{number}", 4, 4, tenant=tenant)
    while len(harness.started()) < 33:
        harness.step()
    counts = Counter(name[0] for name in harness.started())
    assert counts["a"] == pytest.approx(4 * counts["c"], abs=2)
    assert counts["c"] == pytest.approx(2 * counts["b"], abs=2)


def test_clock_never_runs_backwards() -> None:
    """A request that did not fit starts behind one with a later key. A new tenant begins at the later key."""
    order = FairShare({})
    small, large = make_request("small", 10, 10, tenant="a"), make_request("large", 10, 10, tenant="b")
    order.key(make_request("first", 40, 10, tenant="a"), 0.0, 0.0)
    later, earlier = Sequence(small, (order.key(small, 0.0, 0.0), 1), 0.0), Sequence(large, (0.0, 2), 0.0)
    assert order.key(large, 0.0, 0.0) == 0.0 < later.queue_key[0] == 50.0
    order.on_start(later)
    order.on_start(earlier)
    assert order.key(make_request("new", 10, 10, tenant="c"), 0.0, 0.0) == 50.0
