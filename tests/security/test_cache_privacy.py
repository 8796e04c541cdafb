"""A tenant's requests do not change the steps, and so the time, of another tenant's request.

The campaign `campaigns.privacy` measures the same with a clock.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from core.harness import VOCABULARY, CoreHarness

from lineclear.scheduler.security.identity import ANONYMOUS, Identity, cache_salt

ALICE, BOB = Identity("alice", "token"), Identity("bob", "token")
LENGTH = 41


def work(harness: CoreHarness, request_id: str, prompt: list[int], caller: Identity, salt: str = "") -> list[Any]:
    """Return all plans of a request without the tokens in them."""
    before = len(harness.plans)
    harness.submit(request_id, prompt, max_tokens=3, cache_salt=cache_salt(caller, salt))
    harness.run()
    plans = harness.plans[before:]
    return [
        (plan.step, plan.rows, [(i.slot, len(i.tokens), i.prompt_len, i.blocks) for i in plan.inits], plan.zero_blocks)
        for plan in plans
    ]


def is_distinguishable(seed: int, first: tuple[Identity, str], second: tuple[Identity, str], **sizes: Any) -> bool:
    """Return whether the second caller's plans depend on an equal earlier request of the first.

    Two equal runs: in one the second caller repeats the prompt of the first, in the other it sends a new prompt.
    """
    plans = []
    for repeated in (True, False):
        harness, rng = CoreHarness(target_batch_tokens=16, **sizes), random.Random(seed)
        for number in range(6):  # blocks of earlier requests
            caller = rng.choice((ALICE, BOB, ANONYMOUS))
            work(harness, f"past{number}", [0, *rng.choices(range(VOCABULARY), k=rng.randrange(60))], caller)
        # Neither begins like an earlier request, of which the second caller may share its own.
        secret, other = ([first_token, *rng.choices(range(VOCABULARY), k=LENGTH - 1)] for first_token in (1, 2))
        work(harness, "first", secret, *first)
        plans.append(work(harness, "second", secret if repeated else other, *second))
    return plans[0] != plans[1]


@pytest.mark.parametrize("num_blocks", [24, 512], ids=["tight", "ample"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((ALICE, ""), (BOB, "")),
        ((ALICE, ""), (ANONYMOUS, "")),
        ((ANONYMOUS, ""), (BOB, "")),
        ((ALICE, "a"), (BOB, "a")),  # the caller's own salt gives no access to another's share
        ((ALICE, "a"), (ALICE, "")),
        ((ALICE, ""), (Identity("alice", "certificate"), "")),
    ],
)
def test_prompt_of_another_tenant_is_computed_in_full(first: Any, second: Any, num_blocks: int) -> None:
    assert not any(is_distinguishable(seed, first, second, worker_num_blocks=num_blocks) for seed in range(12))


@pytest.mark.parametrize("salt", ["", "a"])
def test_own_cached_prompt_takes_fewer_steps(salt: str) -> None:
    """Check that the previous test can see a difference."""
    assert all(is_distinguishable(seed, (ALICE, salt), (ALICE, salt), worker_num_blocks=512) for seed in range(12))
