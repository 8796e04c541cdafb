"""Several outputs of one request: real processes and the real client. test_output_combinations.py has every feature."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.service import is_idle
from support.toy_service import ToyService, answer, text_of, toy_service
from support.waiting import eventually
from typer.testing import CliRunner

from lineclear.cli.app import app
from lineclear.client import AsyncClient, Client, FinishReason, Generation, RetryPolicy
from lineclear.errors import Cancelled, DeadlineExceeded, QueueFull

PROMPT = [7, 8, 9, 10, 11, 12, 13]
SEED = 2**64 - 2  # the seeds of outputs 2 and 3 wrap around
SEEDS = [2**64 - 2, 2**64 - 1, 0, 1]
LENGTH = 40
SLOW = {"min_step_seconds": 0.004, "max_step_seconds": 0.004, "max_model_len": 512}
PATIENT = RetryPolicy(max_attempts=1000, max_resumes=10_000, max_pause_seconds=0.2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyService]:
    with toy_service(tmp_path_factory.mktemp("toy"), "--max-batch-size", "6", **SLOW) as service:
        yield service
        with Client(service.target) as client:
            eventually(lambda: is_idle(client.stats()))


STOP_IDS = [number for number in range(512) if number % 32 == 3]
PARAMS: dict[str, Any] = {"seed": SEED, "max_tokens": LENGTH, "ignore_eos": True, "stop_token_ids": STOP_IDS}


def right(seed: int) -> list[int]:
    return answer(PROMPT, LENGTH, seed=seed, stop_ids=tuple(STOP_IDS))


def check(result: Generation, seeds: list[int]) -> None:
    assert [output.seed for output in result.outputs] == seeds
    assert [output.index for output in result.outputs] == list(range(len(seeds)))
    for output in result.outputs:
        tokens = right(output.seed)
        assert list(output.token_ids) == tokens
        is_stopped = tokens[-1] in STOP_IDS
        assert output.finish_reason is (FinishReason.STOP_TOKEN if is_stopped else FinishReason.LENGTH)
        assert output.usage.completion_tokens == len(tokens)
    assert result.token_ids == result.outputs[0].token_ids
    assert result.usage.prompt_tokens == len(PROMPT)
    assert result.usage.completion_tokens == sum(len(output.token_ids) for output in result.outputs)


@pytest.mark.parametrize("sessions", [False, True], ids=["generate", "session"])
def test_deltas_name_their_output(service: ToyService, sessions: bool) -> None:
    async def read() -> tuple[list[list[int]], list[str]]:
        tokens: list[list[int]] = [[] for _ in SEEDS]
        texts = [""] * len(SEEDS)
        async with AsyncClient(service.target, sessions=sessions) as client:
            others = [client.generate(PROMPT, n=2, **PARAMS) for _ in range(3)]
            waiting = asyncio.gather(*others)
            async with client.stream(PROMPT, n=4, **PARAMS) as stream:
                async for delta in stream:
                    assert delta.first_index == len(tokens[delta.index])
                    tokens[delta.index] += delta.token_ids
                    texts[delta.index] += delta.text
            for result in await waiting:
                check(result, SEEDS[:2])
        assert stream.texts == tuple(texts)
        return tokens, texts

    tokens, texts = asyncio.run(read())
    assert tokens == [right(seed) for seed in SEEDS]
    assert texts == [text_of(right(seed)[:-1] if right(seed)[-1] in STOP_IDS else right(seed)) for seed in SEEDS]


def test_commands_show_each_output_of_a_submitted_request(service: ToyService) -> None:
    def shown(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--target", service.target])
        assert done.exit_code == 0, done.output
        return done.stdout

    with Client(service.target) as client:
        submitted = client.submit(PROMPT, n=2, **PARAMS)
        texts = [output.text for output in submitted.result().outputs]
        whole = f"--- output 0\n{texts[0]}\n--- output 1\n{texts[1]}\n"
        assert shown("attach", submitted.request_id) == whole
        assert shown("result", submitted.request_id) == whole
        assert shown("result", submitted.request_id, "--no-wait") == whole
        assert json.loads(shown("result", submitted.request_id, "--no-wait", "--json"))["texts"] == texts


def test_batch_and_more_outputs_than_slots(service: ToyService) -> None:
    with Client(service.target) as client:
        for result in client.generate_batch([PROMPT] * 3, n=2, **PARAMS):
            check(result, SEEDS[:2])
        many = client.generate(PROMPT, n=20, **{**PARAMS, "seed": 0})
    assert [list(output.token_ids) for output in many.outputs] == [right(seed) for seed in range(20)]


def test_outputs_are_resumed_on_the_next_server(tmp_path: Path) -> None:
    stop = answer(PROMPT, 120, seed=SEEDS[1])[12]  # one output is complete when the server is killed
    params = {**PARAMS, "max_tokens": 120, "stop_token_ids": [stop]}
    tokens = [answer(PROMPT, 120, seed=seed, stop_ids=(stop,)) for seed in SEEDS]
    assert len(tokens[1]) == 13
    assert max(map(len, tokens)) > 60
    with toy_service(tmp_path, **SLOW) as service, Client(service.target, retry=PATIENT, sessions=True) as client:
        with client.stream(PROMPT, n=4, **params) as stream:
            while next(stream).first_index < 25:
                pass
            service.kill()
            service.start(wait=False)
            list(stream)
        assert [list(output.token_ids) for output in stream.result.outputs] == tokens
        assert stream.resumes
        assert [output.seed for output in stream.result.outputs] == SEEDS


@pytest.mark.parametrize("sessions", [False, True], ids=["generate", "session"])
def test_cancel_of_one_output_leaves_the_others(service: ToyService, sessions: bool) -> None:
    with Client(service.target, sessions=sessions) as client:
        params = {**PARAMS, "max_tokens": 450, "stop_token_ids": None}
        with client.stream(PROMPT, n=3, request_id="one-of-three", **params) as stream:
            while (delta := next(stream)).index != 1 or delta.first_index + len(delta.token_ids) <= 10:
                pass  # a chunk of a busy machine holds several tokens
            assert client.cancel("one-of-three", index=1)
            assert not client.cancel("one-of-three", index=3)
            list(stream)
        first, cancelled, last = stream.result.outputs
        assert cancelled.finish_reason is FinishReason.CANCELLED
        assert 10 < len(cancelled.token_ids) < 450
        for output in (first, cancelled, last):
            whole = answer(PROMPT, 450, seed=output.seed)
            assert list(output.token_ids) == whole[: len(output.token_ids)]
        assert len(first.token_ids) == len(last.token_ids) == 450


def test_cancel_and_deadline_end_all_outputs(service: ToyService) -> None:
    params: dict[str, Any] = {"n": 4, "max_tokens": 400, "ignore_eos": True}
    with Client(service.target) as client:
        before = client.stats().counters.requests_cancelled
        with client.stream(PROMPT, request_id="all-of-it", **params) as stream:
            next(stream)
            assert client.cancel("all-of-it")
            with pytest.raises(Cancelled):
                list(stream)
        eventually(lambda: client.stats().counters.requests_cancelled - before == 1)
        eventually(lambda: is_idle(client.stats()))
        with pytest.raises(DeadlineExceeded):
            client.generate(PROMPT, timeout_seconds=0.2, **params)
        eventually(lambda: is_idle(client.stats()))


def test_a_full_queue_rejects_all_outputs_or_none(tmp_path: Path) -> None:
    flags = ("--max-batch-size", "1", "--max-queue-size", "2", "--max-queue-tokens", "25")
    with (
        toy_service(tmp_path, *flags, **SLOW) as service,
        Client(service.target, max_attempts=1, sessions=False) as client,
        Client(service.target, max_attempts=1, sessions=True) as session,
    ):
        running = client.submit([1], max_tokens=500, ignore_eos=True)
        eventually(lambda: client.stats().gauges.num_requests_running == 1)
        waiting = client.submit(PROMPT, n=3, **PARAMS)  # one place, the prompt once
        both = client.submit(PROMPT, n=2, **PARAMS)
        eventually(lambda: client.stats().counters.requests_admitted == 3)
        for call in (client.generate, session.generate, client.submit):
            with pytest.raises(QueueFull):
                call(PROMPT, n=4, **PARAMS)
        running.cancel()
        check(waiting.result(), SEEDS[:3])
        check(both.result(), SEEDS[:2])
        eventually(lambda: client.stats().counters.requests_finished == 2)
        counters = client.stats().counters
        assert (counters.requests_admitted, counters.requests_cancelled) == (3, 1)
