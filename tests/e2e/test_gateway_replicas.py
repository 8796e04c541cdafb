"""One gateway before two replicas: where requests go, and what an HTTP client sees of a killed and an upgraded one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from support.demo import PROMPTS, model
from support.service import Service, running, wait_for
from support.sockets import free_ports
from support.time_limits import PATIENCE_SECONDS

pytestmark = pytest.mark.exhaustive

LENGTH = 200
HEARS_SECONDS = 5.0
"""After which the gateway knows what a replica has cached. Nothing tells when, and before it requests go anywhere."""
FAMILIES = [prompt * 12 for prompt in PROMPTS[:4]]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0.0, "extra_body": {"ignore_eos": True}}


@dataclass
class Replica:
    service: Service
    address: str
    """Where it listens for gateways."""

    def num_requests(self) -> int:
        return self.service.client.stats().counters.requests_admitted

    def own_text(self, prompt: str) -> str:
        ids = list(model()[1](prompt, add_special_tokens=False).input_ids)
        return self.service.client.generate(ids, temperature=0.0, max_tokens=LENGTH, ignore_eos=True).text


@contextlib.contextmanager
def replica(address: str) -> Iterator[Replica]:
    with running("--gateway-listen", address, "--served-model-name", "demo") as service:
        yield Replica(service, address)


@contextlib.contextmanager
def two_replicas() -> Iterator[tuple[list[Replica], openai.OpenAI]]:
    """Run two replicas, smg before them, and a client of it that tries nothing again."""
    *addresses, http, metrics = (f"127.0.0.1:{port}" for port in free_ports(4))
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--policy", "cache_aware", "--log-level", "warn"]
    command += ["--host", "127.0.0.1", "--port", http.rpartition(":")[2]]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics.rpartition(":")[2]]
    command += ["--worker-urls", *(f"grpc://{address}" for address in addresses)]
    with (
        replica(addresses[0]) as first,
        replica(addresses[1]) as second,
        openai.OpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0) as client,
    ):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: all(is_asked(found, client, "a") for found in (first, second)), "both to be asked")
            yield [first, second], client
        finally:
            process.terminate()
            process.wait()


def is_asked(found: Replica, client: openai.OpenAI, prompt: str) -> bool:
    """Whether the gateway sends the prompt to a replica."""
    before = found.num_requests()
    with contextlib.suppress(openai.APIError):
        client.completions.create(prompt=prompt, max_tokens=2, **GREEDY)
    return found.num_requests() > before


def streams(client: openai.OpenAI, *, during: Callable[[], object]) -> list[str | openai.APIError]:
    """Ask twice for a long answer of each family, do something in the midst of all, and return texts and errors."""
    begun = threading.Barrier(2 * len(FAMILIES) + 1, timeout=PATIENCE_SECONDS)

    def ask(family: str) -> str | openai.APIError:
        stream = client.completions.create(prompt=family, max_tokens=LENGTH, stream=True, **GREEDY)
        texts = [next(iter(stream)).choices[0].text]
        begun.wait()
        try:
            return "".join(texts + [piece.choices[0].text for piece in stream if piece.choices])
        except openai.APIError as error:
            return error

    with ThreadPoolExecutor(2 * len(FAMILIES)) as pool:
        answers = [pool.submit(ask, family) for family in FAMILIES * 2]
        begun.wait()
        during()
        return [answer.result() for answer in answers]


def own_texts(replicas: list[Replica]) -> list[str]:
    """Return the expected answers. Both have the prompts in their caches then, so each is asked for some."""
    texts = [[found.own_text(family) for family in FAMILIES] for found in replicas]
    assert texts[0] == texts[1]
    return texts[0] * 2


def homes(replicas: list[Replica], client: openai.OpenAI, turn: int) -> list[bool]:
    """Ask once for each family, and return which requests went to the first replica."""
    return [is_asked(replicas[0], client, f"{family} {turn}") for family in FAMILIES]


def test_requests_of_a_family_stay_at_one_replica() -> None:
    with two_replicas() as (replicas, client):
        found = [homes(replicas, client, 0)]
        time.sleep(HEARS_SECONDS)
        found += [homes(replicas, client, turn) for turn in range(1, 5)]
        assert found == found[:1] * 5
        assert set(found[0]) == {True, False}, "one replica has them all"


def test_killed_replica_fails_its_own_streams_only() -> None:
    with two_replicas() as (replicas, client):
        expected = own_texts(replicas)
        answers = streams(client, during=replicas[0].service.process.kill)
        lost = [answer for answer in answers if not isinstance(answer, str)]
        assert 0 < len(lost) < len(answers), lost
        assert all(answer in (text, *lost) for text, answer in zip(expected, answers, strict=True))
        for family in FAMILIES:  # the other one answers at once
            client.completions.create(prompt=family, max_tokens=2, **GREEDY)


def test_upgraded_replica_fails_nothing() -> None:
    with two_replicas() as (replicas, client):
        expected = own_texts(replicas)
        assert streams(client, during=replicas[0].service.process.terminate) == expected
        assert replicas[0].service.process.wait(PATIENCE_SECONDS) == 0
        with replica(replicas[0].address) as newer:
            wait_for(lambda: is_asked(newer, client, "a"), "the newer replica to be asked")
