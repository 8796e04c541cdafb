"""Devices and ranks that fail under the real scheduler and worker, with the demo models."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from campaigns.server import ranks_of
from e2e.test_service import BLOCK_BYTES
from support.demo import PROMPTS, all_at_once, greedy, reference
from support.processes import is_running
from support.service import DEMO_MODEL, running, wait_for
from support.waiting import eventually

LENGTH = 60


def test_answers_survive_faults_of_the_device(tmp_path: Path) -> None:
    """It runs out of memory, and asserts while blocks of preempted requests are in host memory; later ones return."""
    noted = tmp_path / "noted"
    flags = ("--max-batch-size", "6", "--target-batch-tokens", "16", "--no-prefix-cache")
    command = ("--worker-command", f"{sys.executable} -P -m support.faulty_device {noted}")
    with running(*flags, *command, worker=("--num-blocks", "14", "--swap-memory-bytes", "4000000")) as service:
        first = service.worker_pid
        answers = all_at_once(service.client, **greedy(LENGTH))
        assert [a.token_ids for a in answers] == [reference(p, LENGTH) for p in PROMPTS]
        faults = noted.read_text().splitlines()
        assert faults[:2] == ["out of memory", "assert"]
        assert {*faults[2:]} <= {"assert"}, "the process went on with a failed device"
        stats = service.client.stats()
        assert (stats.worker.joins, stats.worker.pid != first) == (3, True), (
            "after a lack of memory the process goes on"
        )
        assert stats.counters.swapped_out_tokens > stats.counters.swapped_in_tokens
        assert stats.counters.requests_failed == 0
        again = all_at_once(service.client, **greedy(LENGTH))
        assert [a.token_ids for a in again] == [a.token_ids for a in answers]
        before, stats = stats.counters, service.client.stats()
        assert stats.workers[0].swap_memory_bytes == 4_000_000 // BLOCK_BYTES * BLOCK_BYTES
        assert before.swapped_in_tokens < stats.counters.swapped_in_tokens <= stats.counters.swapped_out_tokens
        wait_for(service.is_idle, "no block is left")


PROMPT = "The capital of France is"


@pytest.mark.exhaustive
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
