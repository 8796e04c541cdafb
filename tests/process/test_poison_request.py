"""A request that kills every worker that computes it, through real processes and sockets."""

from __future__ import annotations

from dataclasses import replace

from support.engine_harness import EngineHarness, request, supervised
from support.toy_worker import ToyOptions

from lineclear.errors import PoisonRequest
from lineclear.scheduler.core.events import Failed
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_supervisor import SupervisorLimits

POISON = 96


def test_poison_request_fails_after_three_crashes() -> None:
    with EngineHarness(options=ToyOptions(poison_token=POISON)) as harness:

        def body(pool: WorkerPool) -> None:
            innocents = [harness.submit(request(index, prompt_len=20, max_tokens=40)) for index in range(8)]
            poison = harness.submit(replace(request(50, prompt_len=6), prompt=(POISON, 1, 2)))
            innocents += [harness.submit(request(index, prompt_len=20, max_tokens=40)) for index in range(8, 16)]
            harness.wait_ended([poison, *innocents])
            assert isinstance(poison.end, Failed)
            assert isinstance(poison.end.error, PoisonRequest)
            assert poison.tokens == []
            harness.check(innocents)
            assert pool.num_starts == 4
            assert harness.num_explained == 1
            assert harness.give_ups == []

        supervised(harness, body)


def test_poison_requests_do_not_spend_the_crash_budget() -> None:
    """Although no other request makes progress, which would forget the crashes as well."""
    with EngineHarness(options=ToyOptions(poison_token=POISON)) as harness:

        def body(pool: WorkerPool) -> None:
            for turn in range(2):
                poison = harness.submit(replace(request(100 + turn), prompt=(POISON, turn)))
                harness.wait_ended([poison])
                assert isinstance(poison.end, Failed)
                assert isinstance(poison.end.error, PoisonRequest)
            assert harness.num_explained == 2
            assert pool.num_starts >= 4  # more crashes than the limit, all explained
            assert harness.give_ups == []

        supervised(harness, body, SupervisorLimits(max_worker_crashes=3, max_backoff_seconds=0.1))
