"""The whole service with real processes, gRPC and the demo model, compared with transformers."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.demo import PROMPTS, all_at_once, greedy, model, reference
from support.service import Service, running, wait_for

LENGTH = 40


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running("--max-batch-size", "3", "--target-batch-tokens", "32", "--max-queue-size", "64") as service:
        yield service
        wait_for(service.is_idle, "idle at the end")


def test_concurrent_streams_equal_generate(service: Service) -> None:
    answers = all_at_once(service.client, **greedy(LENGTH))
    assert [a.token_ids for a in answers] == [reference(p, LENGTH) for p in PROMPTS]
    assert {a.started.slot for a in answers} == {0, 1, 2}


def test_own_end_of_sequence_equals_generate(service: Service) -> None:
    eos = reference(PROMPTS[0], LENGTH)[10]
    loaded, tokenizer = model()
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    wanted = loaded.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=eos)[0]
    answer = service.client.generate(PROMPTS[0], temperature=0.0, max_tokens=24, eos_token_ids=[eos])
    assert list(answer.token_ids) == wanted[inputs["input_ids"].shape[1] :].tolist()
    assert (answer.finish_reason, answer.matched_stop) == ("stop_eos", eos)


def network_sockets(pid: int) -> set[str]:
    """Return the inodes of the process's network sockets."""
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink())
    held = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    of_network = set()
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            of_network.add(line.split()[9])
    return held & of_network


def test_worker_has_no_network_sockets(service: Service) -> None:
    service.client.generate(PROMPTS[0], max_tokens=4)
    assert network_sockets(service.worker_pid) == set()
    with socket.create_server(("127.0.0.1", 0)):  # check that a network socket is found
        assert len(network_sockets(os.getpid())) >= 1


BLOCK_BYTES = 16 * 4 * 2 * 4 * 32 * 4
"""Positions, layers, keys and values, heads, features, and bytes of a float32."""


def test_stats_show_memory_and_load_time(service: Service) -> None:
    stats = service.client.stats()
    (worker,) = stats.workers
    assert worker.weight_bytes == sum(weight.numel() * 4 for weight in model()[0].parameters())
    assert worker.kv_cache_bytes == worker.num_blocks * BLOCK_BYTES > 0
    assert (worker.step_memory_bytes, worker.swap_memory_bytes) == (0, 0)
    assert 0.01 < worker.load_seconds < stats.uptime_seconds


def test_cancelled_streams_release_everything(service: Service) -> None:
    rng = random.Random(1)
    tasks = service.client.stats().gauges.asyncio_tasks
    wanted = {prompt: reference(prompt, LENGTH) for prompt in PROMPTS}  # before the threads: loading is not thread-safe
    plans = [(rng.choice(PROMPTS), rng.randint(1, 30), rng.random() < 0.2, rng.randint(0, 8)) for _ in range(24)]

    def read_stream(plan: tuple[str, int, bool, int]) -> bool:
        prompt, max_tokens, hangs_up, after = plan
        with service.client.stream(prompt, ignore_eos=True, **greedy(max_tokens)) as stream:
            for number, _ in enumerate(stream):
                if hangs_up and number >= after:
                    return False
        assert stream.result.token_ids == wanted[prompt][:max_tokens]
        return True

    with ThreadPoolExecutor(24) as pool:
        finished = sum(pool.map(read_stream, plans))
    assert 12 <= finished < 24
    wait_for(service.is_idle, "nothing left of 24 streams")
    wait_for(lambda: service.client.stats().gauges.asyncio_tasks <= tasks, "no task left of 24 streams")
