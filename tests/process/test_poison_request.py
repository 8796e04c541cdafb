"""A request that kills every worker that computes it, through real processes and sockets."""

from __future__ import annotations

from dataclasses import replace

from support.engine_harness import World, request, supervised
from support.toy_worker import ToyOptions

from lineclear.errors import PoisonRequest
from lineclear.scheduler.core.events import Failed
from lineclear.scheduler.engine.worker_supervisor import SupervisorLimits, WorkerSupervisor

POISON = 96


def test_poison_request_fails_after_three_crashes() -> None:
    with World(options=ToyOptions(poison_token=POISON)) as world:

        def body(supervisor: WorkerSupervisor) -> None:
            innocents = [world.submit(request(index, prompt_len=20, max_tokens=40)) for index in range(8)]
            poison = world.submit(replace(request(50, prompt_len=6), prompt=(POISON, 1, 2)))
            innocents += [world.submit(request(index, prompt_len=20, max_tokens=40)) for index in range(8, 16)]
            world.wait_ended([poison, *innocents])
            assert isinstance(poison.end, Failed)
            assert isinstance(poison.end.error, PoisonRequest)
            assert poison.tokens == []
            for stream in innocents:
                stream.check(world.options.vocab_size)
            assert supervisor.num_starts == 4
            assert world.num_explained == 1
            assert world.give_ups == []

        supervised(world, body)


def test_poison_requests_do_not_spend_the_crash_budget() -> None:
    with World(options=ToyOptions(poison_token=POISON)) as world:

        def body(supervisor: WorkerSupervisor) -> None:
            for turn in range(3):
                poison = world.submit(replace(request(100 + turn), prompt=(POISON, turn)))
                innocent = world.submit(request(turn, max_tokens=10))
                world.wait_ended([poison, innocent])
                assert isinstance(poison.end, Failed)
                assert isinstance(poison.end.error, PoisonRequest)
                innocent.check(world.options.vocab_size)
            assert world.num_explained == 3
            assert supervisor.num_starts >= 6  # more crashes than the limit, none of which counts any more
            assert world.give_ups == []

        supervised(world, body, SupervisorLimits(max_crashes=3, max_backoff_seconds=0.2))
