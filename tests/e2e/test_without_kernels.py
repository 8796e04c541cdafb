"""The whole service without native kernels, as after an installation without a compiler: the answers are exact."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.demo import PROMPTS, SEEDED, all_at_once, greedy, reference
from support.service import Service, running, wait_for
from support.time_limits import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Prompts run in chunks, some steps sample nothing, and too few blocks preempt some requests."""
    flags = ("--max-batch-size", "6", "--target-batch-tokens", "16")
    with running(*flags, worker=("--cpu-kernels", "none", "--num-blocks", "12")) as service:
        yield service
        wait_for(service.is_idle, "idle at the end")


def test_answers_equal_generate_without_kernels(service: Service) -> None:
    answers = all_at_once(service.client, **greedy(40))
    assert [a.token_ids for a in answers] == [reference(p, 40) for p in PROMPTS]
    stats = service.client.stats()
    assert stats.worker.attention_backend == "torch_paged"
    assert stats.counters.preemptions > 0


def test_seeded_answers_do_not_depend_on_the_batch(service: Service) -> None:
    alone = [service.client.generate(p, ignore_eos=True, max_tokens=24, **SEEDED).token_ids for p in PROMPTS]
    assert [a.token_ids for a in all_at_once(service.client, max_tokens=24, **SEEDED)] == alone
    assert alone != [reference(p, 24) for p in PROMPTS], "nothing was sampled"


def test_restarted_worker_has_no_kernels_either(service: Service) -> None:
    seen = threading.Event()

    def read(prompt: str) -> tuple[int, ...]:
        with service.client.stream(prompt, ignore_eos=True, **greedy(60)) as stream:
            for delta in stream:
                if delta.first_index >= 10:
                    seen.set()
        return stream.result.token_ids

    incarnation = service.client.stats().worker.joins
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(read, p) for p in PROMPTS]
        assert seen.wait(PATIENCE_SECONDS)
        os.kill(service.worker_pid, signal.SIGKILL)
        assert [a.result() for a in answers] == [reference(p, 60) for p in PROMPTS]
    worker = service.client.stats().worker
    assert (worker.joins, worker.attention_backend) == (incarnation + 1, "torch_paged")
