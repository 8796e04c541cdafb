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
from lineclear.v1 import inference_pb2 as pb
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


def essence(output: Output | Generation) -> tuple[Any, ...]:
    """Return what does not depend on times and batches."""
    return output.token_ids, output.text, output.finish_reason, output.matched_stop, output.logprobs


def alone(client: Client, count: int, **params: Any) -> list[Generation]:
    """Return the answers of single requests with the seeds of `count` outputs."""
    return [client.generate(PROMPT, **params, seed=(SEED + i) % 2**64) for i in range(count)]


def ask(service: ToyService, route: str, **params: Any) -> Generation:
    with Client(service.target, sessions=route == "session") as client:
        if route == "submit":
            return client.submit(PROMPT, **params).result()
        return client.generate(PROMPT, **params)


def mean_logprob(answer: Generation) -> float:
    return sum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)


@pytest.mark.parametrize("route", ["generate", "session", "submit"])
@pytest.mark.parametrize("feature", FEATURES)
def test_outputs_equal_single_requests(service: ToyService, route: str, feature: str) -> None:
    params = {key: value for key, value in (BASE | FEATURES[feature]).items() if key != "seed"}
    with Client(service.target) as client:
        singles = alone(client, 3, **params)
        result = ask(service, route, n=3, seed=SEED, **params)
        assert [essence(output) for output in result.outputs] == [essence(answer) for answer in singles]
        assert [output.seed for output in result.outputs] == [SEED, 0, 1]
        for name in ("prompt_text", "prompt_token_ids", "prompt_logprobs"):
            assert getattr(result, name) == getattr(singles[0], name)
        assert result.usage.prompt_tokens == singles[0].usage.prompt_tokens
        if feature == "drafts":
            assert sum(output.timings.drafted_tokens for output in result.outputs) > 0
        if feature in ("stop string", "stop regex", "stop tokens"):
            assert {output.finish_reason for output in result.outputs} != {"length"}


@pytest.mark.parametrize("route", ["generate", "session", "submit"])
@pytest.mark.parametrize("feature", FEATURES)
def test_best_outputs_are_the_best_of_single_requests(service: ToyService, route: str, feature: str) -> None:
    params = {key: value for key, value in (BASE | FEATURES[feature]).items() if key not in ("seed", "prompt_logprobs")}
    with Client(service.target) as client:
        singles = sorted(alone(client, 4, **params | {"logprobs": True}), key=mean_logprob, reverse=True)
        result = ask(service, route, n=2, best_of=4, seed=SEED, **params)
    assert [output.seed for output in result.outputs] == [answer.started.seed for answer in singles[:2]]
    assert result.usage.prompt_tokens == singles[0].usage.prompt_tokens
    shown = "logprobs" in params
    wanted = [essence(answer) if shown else (*essence(answer)[:-1], ()) for answer in singles[:2]]
    assert [essence(output) for output in result.outputs] == wanted
    assert [output.score for output in result.outputs] == pytest.approx([mean_logprob(a) for a in singles[:2]])


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("session", {"n": 3}),
        ("generate", {"n": 3}),
        ("session", {"n": 2, "best_of": 3}),
        ("generate", {"num_beams": 3}),
    ],
    ids=str,
)
def test_killed_workers_and_schedulers_change_nothing(tmp_path: Path, route: str, kind: dict[str, int]) -> None:
    params = {"max_tokens": 90, "ignore_eos": True, "logprobs": True, "echo": True, "adapter": "a", **kind}
    if "num_beams" not in kind:
        params |= {"seed": SEED, "num_speculative_tokens": 4}
    slow = {"min_step_seconds": 0.004, "max_step_seconds": 0.004, "max_model_len": 512}
    with (
        toy_service(tmp_path, *flags(tmp_path), **slow) as service,
        Client(service.target, retry=PATIENT, sessions=route == "session") as client,
        ThreadPoolExecutor(3) as pool,
    ):
        wanted = client.generate(PROMPT, **params)
        found = [pool.submit(client.generate, PROMPT, **params) for _ in range(3)]
        for _ in range(2):
            done = client.stats().counters.steps
            eventually(lambda done=done: client.stats().counters.steps > done + 8)
            os.kill(client.stats().worker.pid, signal.SIGKILL)
            eventually(lambda: client.stats().worker.up)
        service.kill()
        service.start()
        for answer in found:
            result = answer.result(PATIENCE_SECONDS)
            assert [essence(output) for output in result.outputs] == [essence(output) for output in wanted.outputs]
            assert (result.prompt_text, result.prompt_token_ids) == (wanted.prompt_text, wanted.prompt_token_ids)
        eventually(lambda: is_idle(client.stats()))


@pytest.mark.parametrize("feature", ["echo", "adapter", "drafts", "all"])
def test_resume_of_some_outputs_changes_nothing(service: ToyService, feature: str) -> None:
    """Output 0 is complete, of output 1 nothing was received, of output 2 half."""
    params = BASE | FEATURES[feature]
    with Client(service.target, sessions=False) as client:
        whole = client.generate(PROMPT, n=3, **params)
        message = Request.of(PROMPT, n=3, **params).to_proto()
        message.resume.model_fingerprint = whole.started.model_fingerprint
        received = [len(whole.outputs[0].token_ids), 0, len(whole.outputs[2].token_ids) // 2]
        message.resume.outputs.add(is_complete=True)
        for output, have in zip(whole.outputs[1:], received[1:], strict=True):
            message.resume.outputs.add(token_ids=output.token_ids[:have])
        texts, tokens = (
            ["", "", ""],
            [list(o.token_ids[:have]) for o, have in zip(whole.outputs, received, strict=True)],
        )
        for response in generate(service.target, message):
            assert not response.HasField("prompt_echo"), "it came with output 0"
            tokens[response.index] += response.token_ids
            texts[response.index] += response.text
    assert [tuple(t) for t in tokens] == [output.token_ids for output in whole.outputs]
    assert texts[1] == whole.outputs[1].text
    assert whole.outputs[2].text.endswith(texts[2])


def generate(target: str, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    with grpc.insecure_channel(target) as channel:
        return list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(message))
