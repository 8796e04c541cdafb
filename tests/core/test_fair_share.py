"""The order `fair` on an overloaded server."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from core.harness import CoreHarness, make_request

from lineclear.scheduler.core.dump import dump
from lineclear.scheduler.core.policies import FairShare, PolicySettings
from lineclear.scheduler.core.sequence import Request, Sequence
from lineclear.wire.messages import Pooling, PoolingKind

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
    order = FairShare(PolicySettings())
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
    order = FairShare(PolicySettings())
    pooling = Pooling(PoolingKind.LAST)
    for number in range(3):
        part = make_request(f"a{number}", 20, 0, tenant="a", is_sibling=number > 0, pooling=pooling)
        order.key(part, 0.0, 0.0)
    assert charged(order) == 3 * 20


def test_steps_of_a_beam_search_are_charged_like_one_request() -> None:
    order = FairShare(PolicySettings())
    order.key(make_request("lives", 2, 60, tenant="a"), 0.0, 0.0)
    for step in range(5):
        for beam, request in enumerate(beam_step(step)):
            run_through(order, request, 3 * step + beam)
    assert charged(order) == 62 + 20 + 1 + 4 * 3


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


def test_clock_never_runs_backwards() -> None:
    """A request that did not fit starts behind one with a later key. A new tenant begins at the later key."""
    order = FairShare(PolicySettings())
    small, large = make_request("small", 10, 10, tenant="a"), make_request("large", 10, 10, tenant="b")
    order.key(make_request("first", 40, 10, tenant="a"), 0.0, 0.0)
    later, earlier = Sequence(small, (order.key(small, 0.0, 0.0), 1), 0.0), Sequence(large, (0.0, 2), 0.0)
    assert order.key(large, 0.0, 0.0) == 0.0 < later.queue_key[0] == 50.0
    order.on_start(later)
    order.on_start(earlier)
    assert order.key(make_request("new", 10, 10, tenant="c"), 0.0, 0.0) == 50.0
