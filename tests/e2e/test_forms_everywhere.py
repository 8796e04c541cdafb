"""Structured output with the other parameters, over real processes: the same tokens alone, crowded and interrupted."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.adapter_folders import write_random_adapter
from support.service import DEMO_MODEL, Service, running, wait_for
from support.time_limits import PATIENCE_SECONDS
from support.worker_kills import signal_worker

from lineclear.client import Client, Generation, RetryPolicy
from lineclear.errors import NoTokenAllowed

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
WORDS = r"[a-z]{4,9}( [a-z]{2,7}){6,9}\."
Check = Callable[[Generation], object]


def matches(pattern: str) -> Check:
    def check(answer: Generation) -> None:
        for output in answer.outputs:
            assert re.fullmatch(pattern, output.text), output.text

    return check


def is_valid(answer: Generation) -> None:
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def is_cut(answer: Generation) -> None:
    assert (answer.finish_reason, answer.matched_stop) == ("stop_string", ";")
    assert re.fullmatch("[a-z]+", answer.text)


def has_logprobs(answer: Generation) -> None:
    is_valid(answer)
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(entry.logprob <= 0 for entry in answer.logprobs)


def thought_first(answer: Generation) -> None:
    before, _, form = answer.text.partition(".")
    assert len(before) > 1
    assert re.fullmatch("(yes|no)", form)


CASES: dict[str, tuple[dict[str, Any], Check]] = {
    "schema": ({"json_schema": SCHEMA}, is_valid),
    "n": ({"regex": WORDS, "n": 3}, matches(WORDS)),
    "best_of": ({"regex": WORDS, "best_of": 3}, matches(WORDS)),
    "logprobs": ({"json_schema": SCHEMA, "top_logprobs": 3}, has_logprobs),
    "stop string": ({"regex": "[a-z]{3,6};[a-z]{90}", "stop": [";"]}, is_cut),
    "min_tokens": ({"regex": "[a-z]{1,200}", "min_tokens": 20}, matches("[a-z]{20,}")),
    "ignore_eos": ({"regex": WORDS, "ignore_eos": True, "stop_token_ids": [5]}, matches(WORDS)),
    "adapter": ({"regex": WORDS, "adapter": "a"}, matches(WORDS)),
    "marker": ({"choice": ["yes", "no"], "constraint_start": "."}, thought_first),
    "penalties": ({"regex": WORDS, "repetition_penalty": 1.5, "dry_multiplier": 1.0, "top_p": 0.9}, matches(WORDS)),
    "bias": ({"choice": ["ab", "cd"], "logit_bias": dict.fromkeys(range(300), -100.0)}, matches("ab|cd")),
    "free": ({"temperature": 0, "ignore_eos": True}, lambda answer: None),
    "drafts": ({"regex": "(ab){20,24}", "num_speculative_tokens": 4}, matches("(ab){20,24}")),
}
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "bad words": {"choice": ["yes"], "bad_words": ["yes", "ye", "y", "es", "s"]},
    "first token": {"regex": "[0-9]", "begin_banned_token_ids": list(range(1000))},
    "allowed ids": {"regex": "[a-z]+", "allowed_token_ids": [2, 3]},
    "min_tokens": {"choice": ["a"], "min_tokens": 9},
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    adapter = write_random_adapter(tmp_path_factory.mktemp("adapters") / "a", DEMO_MODEL, seed=3)
    return "--max-batch-size", "8", "--speculative-method", "prompt_lookup", "--lora-modules", f"a={adapter}"


@pytest.fixture(scope="module")
def service(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run the demo model with too few blocks for eight answers."""
    with running(*flags, worker=("--num-blocks", "40", "--block-size", "4")) as found:
        yield found


DEFAULTS: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 120}


def prompt(name: str) -> str:
    return f"Once upon a time, {name} was"


def ask(client: Client, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each output of a case, whose form was checked."""
    params, check = CASES[name]
    answer = client.generate(prompt(name), **DEFAULTS | params)
    check(answer)
    return tuple(output.token_ids for output in answer.outputs)


@pytest.fixture(scope="module")
def alone(service: Service) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {name: ask(service.client, name) for name in CASES}


def test_tokens_depend_neither_on_other_requests_nor_on_a_dead_worker(service: Service, alone: dict[str, Any]) -> None:
    """Two of each case run at once."""
    names, before = [*CASES, *CASES], service.client.stats().counters
    with ThreadPoolExecutor(len(names)) as pool:
        found = pool.map(lambda name: ask(service.client, name), names)
        wanted = before.generation_tokens + 60
        wait_for(lambda: service.client.stats().counters.generation_tokens > wanted, "some tokens")
        signal_worker(lambda: service.worker_pid)
        assert list(found) == [alone[name] for name in names]
    after = service.client.stats().counters
    assert after.preemptions > before.preemptions
    assert after.prefix_cache_hits > before.prefix_cache_hits


def test_answers_continue_on_another_scheduler(
    service: Service, flags: tuple[str, ...], alone: dict[str, Any], folder: Path
) -> None:
    """All but the outputs that arrive whole. The first scheduler has one step in flight and enough blocks."""
    address = folder / "api.sock"
    names = [name for name in CASES if name not in ("best_of", "n")]
    begun = threading.Barrier(len(names) + 1)

    def read(client: Client, name: str) -> Generation:
        params, check = CASES[name]
        with client.stream(prompt(name), **DEFAULTS | params) as stream:
            next(stream)
            begun.wait(PATIENCE_SECONDS)
            for _ in stream:
                pass
        check(stream.result)
        return stream.result

    retry = RetryPolicy(max_attempts=1000, max_resumes=1000, max_pause_seconds=0.2)
    with Client(f"unix:{address}", retry=retry) as client, ThreadPoolExecutor(len(names)) as pool:
        with running(*flags, "--pipeline-depth", "1", listen=f"unix:{address}") as first:
            reading = [pool.submit(read, client, name) for name in names]
            begun.wait(PATIENCE_SECONDS)
            first.process.kill()
            first.process.wait()
            address.unlink()
            address.symlink_to(service.target.removeprefix("unix:"))
        answers = [future.result() for future in reading]
    assert sum(answer.resumes for answer in answers) > 0
    assert {name: (answer.token_ids,) for name, answer in zip(names, answers, strict=True)} == {
        name: alone[name] for name in names
    }


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_form_without_an_allowed_token_ends_clearly(service: Service, name: str) -> None:
    with pytest.raises(NoTokenAllowed):
        service.client.generate("Once", temperature=0, max_tokens=30, **IMPOSSIBLE[name])
    assert service.client.generate("Is it?", choice=["yes", "no"], temperature=0, max_tokens=9).text in ("yes", "no")
