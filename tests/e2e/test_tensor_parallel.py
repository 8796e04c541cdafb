"""A worker with tensor parallelism behind the real scheduler: a rank that hangs."""

from __future__ import annotations

import os
import signal

from campaigns.server import ranks_of
from support.processes import is_running
from support.service import DEMO_MODEL, running
from support.waiting import eventually

PROMPT = "The capital of France is"


def test_worker_whose_rank_hangs_is_replaced() -> None:
    """Its heartbeats go on. The step timeout ends it, and with it the stopped rank; the stream goes on exactly."""
    times = "--step-timeout-seconds", "3", "--cold-step-timeout-seconds", "30"
    model = DEMO_MODEL.with_name("model-tiny")
    with running(*times, worker=("--tensor-parallel-size", "2"), model=model) as service:
        sampling = {"max_tokens": 120, "temperature": 0.8, "seed": 5, "ignore_eos": True}
        expected = service.client.generate(PROMPT, **sampling)
        pid = service.worker_pid
        (rank,) = ranks_of(pid)
        with service.client.stream(PROMPT, **sampling) as stream:
            next(iter(stream))
            os.kill(rank, signal.SIGSTOP)
            for _ in stream:
                pass
        assert stream.result.token_ids == expected.token_ids
        assert service.worker_pid != pid
        eventually(lambda: not is_running(rank), what="the end of the stopped rank")
