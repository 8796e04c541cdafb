"""What one tenant has asked does not change the work that the request of another takes, step by step, hence no time.

The campaign `campaigns.privacy` times the same with a clock.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from core.harness import VOCABULARY, CoreHarness

from lineclear.scheduler.security.identity import ANONYMOUS, Identity, cache_salt

ALICE, BOB = Identity("alice", "token"), Identity("bob", "token")
LENGTH = 41


def work(harness: CoreHarness, request_id: str, prompt: list[int], who: Identity, narrower: str = "") -> list[Any]:
    """All of the plans that a request takes but the tokens in them."""
    before = len(harness.plans)
    harness.submit(request_id, prompt, max_tokens=3, cache_salt=cache_salt(who, narrower))
    harness.run()
    plans = harness.plans[before:]
    return [
        (plan.step, plan.rows, [(i.slot, len(i.tokens), i.prompt_len, i.blocks) for i in plan.inits], plan.zero_blocks)
        for plan in plans
    ]


def told_apart(seed: int, first: tuple[Identity, str], second: tuple[Identity, str], **sizes: Any) -> bool:
    """Whether the second caller's work shows if the first one has asked the same before.

    Two equal lives, but that in one of them the second asks what the first has asked, and in the other something new.
    """
    seen = []
    for again in (True, False):
        harness, dice = CoreHarness(target_batch_tokens=16, **sizes), random.Random(seed)
        for number in range(6):  # what others left behind
            who = dice.choice((ALICE, BOB, ANONYMOUS))
            work(harness, f"past{number}", dice.choices(range(VOCABULARY), k=dice.randrange(1, 60)), who)
        secret, other = (dice.choices(range(VOCABULARY), k=LENGTH) for _ in range(2))
        work(harness, "first", secret, *first)
        seen.append(work(harness, "second", secret if again else other, *second))
    return seen[0] != seen[1]


@pytest.mark.parametrize("num_blocks", [24, 64, 512], ids=["tight", "small", "ample"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((ALICE, ""), (BOB, "")),
        ((ALICE, ""), (ANONYMOUS, "")),
        ((ANONYMOUS, ""), (BOB, "")),
        ((ALICE, "a"), (BOB, "a")),  # the caller's own salt leads nobody into another's share
        ((ALICE, "a"), (ALICE, "")),
        ((ALICE, ""), (Identity("alice", "certificate"), "")),
    ],
)
def test_prompt_of_another_tenant_is_computed_in_full(first: Any, second: Any, num_blocks: int) -> None:
    assert not any(told_apart(seed, first, second, worker_num_blocks=num_blocks) for seed in range(20))


@pytest.mark.parametrize("salt", ["", "a"])
def test_own_cached_prompt_takes_fewer_steps(salt: str) -> None:
    """Or the test above would see nothing."""
    assert all(told_apart(seed, (ALICE, salt), (ALICE, salt), worker_num_blocks=512) for seed in range(20))
