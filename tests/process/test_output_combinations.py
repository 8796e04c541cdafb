"""Several outputs with every other feature of a request, over every route, faults included: as single requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.adapter_folders import write_adapter
from support.service import is_idle
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import ToyService, toy_service
from support.waiting import eventually

from lineclear.client import Client, Generation, Output, RetryPolicy
from lineclear.client.requests import Request
from lineclear.v1 import inference_pb2_grpc

PROMPT = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8]
SEED = 2**64 - 1  # the seeds of outputs 1 and 2 are 0 and 1
BASE: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": SEED}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "echo": {"echo": True, "prompt_logprobs": 1, "truncate_prompt_tokens": 6},
    "adapter": {"adapter": "a"},
    "drafts": {"num_speculative_tokens": 6, "temperature": 0.7},
    "stop string": {"stop": ["e", "th"], "include_stop_string": True, "min_tokens": 9},
    "stop regex": {"stop_regex": "[aeiou].{1,3}[xyz]", "min_tokens": 5},
    "stop tokens": {"stop_token_ids": list(range(3, 512, 32)), "min_tokens": 4},
    "repetition": {"repetition_detection": {"max_pattern_size": 8, "min_count": 2}},
    "all": {
        "logprobs": True, "echo": True, "adapter": "a", "num_speculative_tokens": 4, "stop": ["qu", "zz"],
        "stop_token_ids": [5, 6, 7], "token_timings": True, "keep_special_tokens": True,
    },
}  # fmt: skip
PATIENT = RetryPolicy(max_attempts=1000, max_resumes=10_000, max_pause_seconds=0.2)


def flags(folder: Path) -> tuple[str, ...]:
    if not (folder / "adapters").exists():
        write_adapter(folder / "adapters" / "a", 1)
    drafts = ("--speculative-method", "prompt_lookup", "--no-speculative-adaptive")
    return "--lora-modules", f"a={folder}/adapters/a", "--scheduling-policy", "fair", "--max-batch-size", "6", *drafts


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyService]:
    folder = tmp_path_factory.mktemp("toy")
    with toy_service(folder, *flags(folder), max_model_len=512) as service:
        yield service
        with Client(service.target) as client:
            eventually(lambda: is_idle(client.stats()))


def essence(output: Output | Generation, with_logprobs: bool = True) -> tuple[Any, ...]:
    """Return what does not depend on times and batches."""
    logprobs = output.logprobs if with_logprobs else ()
    return output.token_ids, output.text, output.finish_reason, output.matched_stop, logprobs


def alone(client: Client, count: int, **params: Any) -> list[Generation]:
    """Return the answers of single requests with the seeds of `count` outputs."""
    return [client.generate(PROMPT, **params, seed=(SEED + i) % 2**64) for i in range(count)]


def mean_logprob(answer: Generation) -> float:
    return sum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)


ROUTES = ("generate", "session", "submit")
CASES = [(feature, ROUTES[number % 3]) for number, feature in enumerate(FEATURES)]
CASES += [("all", route) for route in ROUTES if ("all", route) not in CASES]
"""Each feature over one route, and all features together over each."""


@pytest.mark.parametrize(("feature", "route"), CASES)
def test_outputs_are_those_of_single_requests(service: ToyService, feature: str, route: str) -> None:
    """The three outputs of n=3 in order, and of n=2 with best_of=4 those with the best means."""
    params = {key: value for key, value in (BASE | FEATURES[feature]).items() if key != "seed"}
    shown = "logprobs" in params
    with Client(service.target, sessions=route == "session") as client:

        def ask(**more: Any) -> Generation:
            if route == "submit":
                return client.submit(PROMPT, seed=SEED, **more).result()
            return client.generate(PROMPT, seed=SEED, **more)

        singles = alone(client, 4, **params | {"logprobs": True})
        result = ask(n=3, **params)
        chosen = ask(n=2, best_of=4, **{key: value for key, value in params.items() if key != "prompt_logprobs"})
    assert [essence(output) for output in result.outputs] == [essence(answer, shown) for answer in singles[:3]]
    assert [output.seed for output in result.outputs] == [SEED, 0, 1]
    for name in ("prompt_text", "prompt_token_ids", "prompt_logprobs"):
        assert getattr(result, name) == getattr(singles[0], name)
    assert result.usage.prompt_tokens == chosen.usage.prompt_tokens == singles[0].usage.prompt_tokens
    if feature == "drafts":
        assert sum(output.timings.drafted_tokens for output in result.outputs) > 0
    if feature in ("stop string", "stop regex", "stop tokens"):
        assert {output.finish_reason for output in result.outputs} != {"length"}
    best = sorted(singles, key=mean_logprob, reverse=True)[:2]
    assert [output.seed for output in chosen.outputs] == [answer.started.seed for answer in best]
    assert [essence(output) for output in chosen.outputs] == [essence(answer, shown) for answer in best]
    assert [output.score for output in chosen.outputs] == pytest.approx([mean_logprob(answer) for answer in best])


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("session", {"n": 3, "seed": SEED, "num_speculative_tokens": 4}),
    ("generate", {"n": 3, "seed": SEED, "num_speculative_tokens": 4}),
    ("session", {"n": 2, "best_of": 3, "seed": SEED, "num_speculative_tokens": 4}),
    ("generate", {"num_beams": 3}),
]


def test_killed_workers_and_schedulers_change_nothing(tmp_path: Path) -> None:
    common = {"max_tokens": 90, "ignore_eos": True, "logprobs": True, "echo": True, "adapter": "a"}
    slow = {"min_step_seconds": 0.004, "max_step_seconds": 0.004, "max_model_len": 512}
    with (
        toy_service(tmp_path, *flags(tmp_path), **slow) as service,
        Client(service.target, retry=PATIENT, sessions=True) as session,
        Client(service.target, retry=PATIENT, sessions=False) as unary,
        ThreadPoolExecutor(len(KINDS)) as pool,
    ):

        def ask(route: str, kind: dict[str, Any]) -> Generation:
            return (session if route == "session" else unary).generate(PROMPT, **common, **kind)

        wanted = list(pool.map(ask, *zip(*KINDS, strict=True)))
        found = [pool.submit(ask, *kind) for kind in KINDS]
        for _ in range(2):
            done = unary.stats().counters.steps
            eventually(lambda done=done: unary.stats().counters.steps > done + 8)
            os.kill(unary.stats().worker.pid, signal.SIGKILL)
            eventually(lambda: unary.stats().worker.up)
        service.kill()
        assert not any(answer.done() for answer in found)
        service.start()
        for answer, right in zip(found, wanted, strict=True):
            result = answer.result(PATIENCE_SECONDS)
            assert [essence(output) for output in result.outputs] == [essence(output) for output in right.outputs]
            assert (result.prompt_text, result.prompt_token_ids) == (right.prompt_text, right.prompt_token_ids)
        eventually(lambda: is_idle(unary.stats()))


def test_resume_of_some_outputs_changes_nothing(service: ToyService) -> None:
    """Output 0 is complete, of output 1 nothing was received, of output 2 half."""
    params = BASE | FEATURES["all"]
    with Client(service.target, sessions=False) as client:
        whole = client.generate(PROMPT, n=3, **params)
    message = Request.of(PROMPT, n=3, **params).to_proto()
    message.resume.model_fingerprint = whole.started.model_fingerprint
    message.resume.outputs.add(is_complete=True)
    first, _, last = (list(output.token_ids) for output in whole.outputs)
    received = [first, [], last[: len(last) // 2]]
    texts = ["", "", ""]
    for have in received[1:]:
        message.resume.outputs.add(token_ids=have)
    with grpc.insecure_channel(service.target) as channel:
        for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(message):
            assert not response.HasField("prompt_echo"), "it came with output 0"
            received[response.index] += response.token_ids
            texts[response.index] += response.text
    assert [tuple(tokens) for tokens in received] == [output.token_ids for output in whole.outputs]
    assert texts[1] == whole.outputs[1].text
    assert whole.outputs[2].text.endswith(texts[2])
