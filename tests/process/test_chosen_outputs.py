"""best_of and beam search: real processes and the real client, equal to a search computed here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.adapter_folders import toy_model, write_adapter
from support.service import is_idle
from support.toy import sample
from support.toy_service import VOCABULARY, ToyService, toy_service
from support.waiting import eventually

from lineclear.client import Client, FinishReason, Generation
from lineclear.errors import Cancelled, DeadlineExceeded, InvalidRequest, QueueFull
from lineclear.scheduler.requests.beam_search import Beam, BeamSearch, BeamSettings, EarlyStopping
from lineclear.wire.messages import Logprobs, Sampling

PROMPT = [7, 8, 9, 10, 11]
SLOW = {"min_step_seconds": 0.004, "max_step_seconds": 0.004, "max_model_len": 512}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "a", 1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[ToyService]:
    flags = ("--max-batch-size", "6", "--max-held-tokens", "2000", "--lora-modules", f"a={adapter}")
    with toy_service(tmp_path_factory.mktemp("toy"), *flags, **SLOW) as service:
        yield service
        with Client(service.target) as client:
            eventually(lambda: is_idle(client.stats()))


def searched(settings: BeamSettings, model: str = "") -> list[Beam]:
    """Return the finished beams of a search over the toy model."""
    search, sampling = BeamSearch(settings), Sampling(logprobs=settings.num_top)
    while not search.is_done:
        steps: list[Logprobs] = []
        for beam in search.running:
            _, logprobs = sample([*PROMPT, *beam.tokens], sampling, len(PROMPT), VOCABULARY, model)
            assert logprobs is not None
            steps.append(logprobs)
        search.advance(steps)
    return search.finished


def check_beams(result: Generation, settings: BeamSettings, count: int, model: str = "") -> None:
    finished = searched(settings, model)[:count]
    assert [output.token_ids for output in result.outputs] == [beam.tokens for beam in finished]
    assert [output.score for output in result.outputs] == pytest.approx([beam.score for beam in finished])


@pytest.mark.parametrize(("route", "early_stopping"), [("generate", False), ("session", True), ("submit", "never")])
def test_beams_equal_the_search(service: ToyService, route: str, early_stopping: Any) -> None:
    stop = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.WHEN_FULL, "never": EarlyStopping.NEVER}
    ends = list(range(0, 112, 7))
    settings = BeamSettings(3, 12, frozenset(ends), 0.6, stop[early_stopping], 2)
    params: dict[str, Any] = {"stop_token_ids": ends, "ignore_eos": True, "min_tokens": 2, "max_tokens": 12}
    params |= {"n": 2, "num_beams": 3, "length_penalty": 0.6, "early_stopping": early_stopping}
    with Client(service.target, sessions=route == "session") as client:
        result = client.submit(PROMPT, **params).result() if route == "submit" else client.generate(PROMPT, **params)
        check_beams(result, settings, 2)
        for output in result.outputs:
            is_stop = output.token_ids[-1] in settings.end_ids
            assert output.finish_reason is (FinishReason.STOP_TOKEN if is_stop else FinishReason.LENGTH)
            assert client.detokenize(output.token_ids[:-1] if is_stop else output.token_ids) == output.text


def test_beams_of_an_adapter_are_those_of_its_model(service: ToyService, adapter: Path) -> None:
    params: dict[str, Any] = {"num_beams": 3, "n": 3, "max_tokens": 8, "ignore_eos": True}
    settings = BeamSettings(3, 8, frozenset())
    with Client(service.target) as client:
        plain = client.generate(PROMPT, top_logprobs=20, **params)
        check_beams(plain, settings, 3)
        assert {len(entry.top_logprobs) for output in plain.outputs for entry in output.logprobs} == {20}
        check_beams(client.generate(PROMPT, adapter="a", **params), settings, 3, toy_model(adapter))


@pytest.mark.parametrize(
    ("kind", "num_generated", "route"),
    [
        ({"n": 4}, 4 * 8, "generate"),
        ({"best_of": 4}, 4 * 8, "session"),
        ({"n": 2, "best_of": 4}, 4 * 8, "submit"),
        ({"num_beams": 4}, 8, "session"),
        ({"n": 3, "num_beams": 4}, 3 * 8, "generate"),
    ],
    ids=str,
)
def test_tokens_are_counted_as_the_caller_sees_them(
    service: ToyService, kind: dict[str, int], num_generated: int, route: str
) -> None:
    """A prompt of two full blocks and a part: the steps of a search look each of them up again."""
    prompt = [10 * len(str(kind)) + len(route), *range(40, 75)]
    params: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "seed": 1, **kind}
    with Client(service.target, sessions=route == "session") as client:
        eventually(lambda: is_idle(client.stats()))
        before = client.stats().counters
        result = client.submit(prompt, **params).result() if route == "submit" else client.generate(prompt, **params)
        eventually(lambda: is_idle(client.stats()))
        after = client.stats().counters
    assert after.prompt_tokens - before.prompt_tokens == len(prompt) == result.usage.prompt_tokens
    assert after.generation_tokens - before.generation_tokens == num_generated
    assert after.prefix_cache_queries - before.prefix_cache_queries == len(prompt)
    assert after.prefix_cache_hits == before.prefix_cache_hits
    if "best_of" not in kind:
        assert result.usage.completion_tokens == num_generated


@pytest.mark.parametrize("kind", [{"num_beams": 4}, {"best_of": 4}], ids=["beams", "best_of"])
def test_cancel_and_deadline_end_everything(service: ToyService, kind: dict[str, int]) -> None:
    params: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, **kind}
    with Client(service.target) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate(PROMPT, timeout_seconds=0.2, **params)
        eventually(lambda: is_idle(client.stats()))
        submitted = client.submit(PROMPT, **params)
        eventually(lambda: submitted.poll().state == "running")
        assert submitted.poll().token_ids == (), "outputs arrive when all are there"
        assert submitted.cancel()
        with pytest.raises(Cancelled):
            submitted.result()
        eventually(lambda: is_idle(client.stats()))
        with pytest.raises(InvalidRequest, match="2000"):
            client.generate(PROMPT, **{**params, "max_tokens": 501})
        assert is_idle(client.stats())


def test_beams_are_running_in_between_two_steps_of_a_search(service: ToyService) -> None:
    """The core has no request of a search then, and an idle engine publishes its figures at once."""
    seen: list[tuple[int, int]] = []
    with Client(service.target) as client, ThreadPoolExecutor() as thread:
        future = thread.submit(client.generate, PROMPT, num_beams=4, max_tokens=200, ignore_eos=True)
        eventually(lambda: client.stats().gauges.num_requests_running == 4)
        while not future.done():
            gauges = client.stats().gauges
            seen.append((gauges.num_requests_running, gauges.num_requests_waiting))
        assert len(future.result().token_ids) == 200
    while seen[-1] == (0, 0):  # the search has ended, and its future is not done yet
        seen.pop()
    assert len(seen) > 20
    assert set(seen) == {(4, 0)}


def test_a_full_queue_rejects_the_request(tmp_path: Path) -> None:
    flags = ("--max-batch-size", "1", "--max-queue-size", "1")
    with toy_service(tmp_path, *flags, **SLOW) as service, Client(service.target, max_attempts=1) as client:
        for kind in ({"num_beams": 4}, {"best_of": 4}):
            running = client.submit([1], max_tokens=500, ignore_eos=True)
            eventually(lambda: client.stats().gauges.num_requests_running == 1)
            waiting = client.submit(PROMPT, max_tokens=6, ignore_eos=True, **kind)
            with pytest.raises(QueueFull):
                client.generate(PROMPT, max_tokens=6, **kind)
            assert waiting.poll().state == "waiting"
            running.cancel()
            assert len(waiting.result().token_ids) == 6
            assert len(client.generate(PROMPT, max_tokens=6, ignore_eos=True, **kind).token_ids) == 6
            eventually(lambda: is_idle(client.stats()))
