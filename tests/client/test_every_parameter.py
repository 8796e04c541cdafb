"""Each parameter of each method of a client has an effect or an error.

The methods and their parameters are read from the signatures, so a new one without a case fails. An effect is seen in
the messages, deadlines and metadata that the transport gets, in the callbacks, or in the result.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest

from lineclear.client import AdminClient, AsyncAdminClient, AsyncClient, Client, Sampling, Submitted
from lineclear.client.call_settings import ConfigArguments
from lineclear.client.prompt_calls import EmbedParams, ScoreParams
from lineclear.client.requests import Params
from lineclear.client.retry import RetryPolicy
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import LineclearError, ModelChanged, QueueFull
from lineclear.v1 import inference_pb2 as pb

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
VALUES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "allowed_token_ids": [5], "banned_token_ids": [5], "seed": 3,
    "min_tokens": 1, "max_tokens": 2, "ignore_eos": True, "bad_words": ["x"], "begin_banned_token_ids": [5],
    "forced_first_token_id": 5, "no_repeat_ngram_size": 2, "exponential_decay_start": 2,
    "exponential_decay_factor": 2.0,
    "typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0, "dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 9,
    "dry_sequence_breakers": [":"], "stop": "x", "stop_regex": "x+", "stop_token_ids": [5], "eos_token_ids": [5],
    "include_stop_string": True, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}, "n": 2,
    "truncate_prompt_tokens": 2, "json_schema": {"type": "integer"}, "json_object": True, "regex": "a", "choice": ["a"],
    "grammar": "start: A", "json_whitespace": "any", "constraint_start": "go", "best_of": 2, "num_beams": 2,
    "length_penalty": 0.5, "early_stopping": "never", "request_id": "mine", "priority": 3, "expected_tokens": 4,
    "num_speculative_tokens": 0, "cache_salt": "s", "adapter": "french", "model": "m", "model_fingerprint": "f",
    "response_format": {"type": "integer"}, "on_model_change": "restart", "add_generation_prompt": False,
    "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "omit_text": True, "logprobs": True,
    "top_logprobs": 2, "prompt_logprobs": 1, "logprob_token_ids": [5], "echo": True, "keep_special_tokens": True,
    "token_timings": True, "queue_position": True, "timeout_seconds": 7.0, "tenant": "eve", "metadata": {"a": "b"},
    "on_queued": None,
}  # fmt: skip
NEEDS = {"json_whitespace": {"json_object": True}, "constraint_start": {"json_object": True}}
"""What a parameter needs beside it."""
CHAT_ONLY = {"tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt"}


class Recorder(FakeTransport):
    """Notes what reaches a server. The first answer is of a model that is replaced."""

    def __init__(self) -> None:
        answers = iter((Answer(pieces=("a", "b"), error=ModelChanged("another model")), *repeat("c d", 1000)))

        def reply(request: Any) -> Any:
            if not isinstance(request, pb.GenerateRequest):
                raise QueueFull("the call is seen")
            return next(answers)

        super().__init__(reply)

    def unary(self, method: Any, request: Any, **options: Any) -> Any:
        try:
            answer = super().unary(method, request, **options)
        except KeyError:  # of an AdminClient
            raise QueueFull("the call is seen") from None
        if isinstance(answer, pb.SubmitResponse) and request.request.output.queue_position:
            answer.queued.requests_ahead = 3
        return answer


def made(run: Callable[[Client], Any], **settings: Any) -> list[str]:
    """Return all that can be seen of calls."""
    transport = Recorder()
    settings.setdefault("retry", RetryPolicy(first_pause_seconds=0.0, max_pause_seconds=0.0))
    with Client(transport=transport, **settings) as client:
        try:
            result = [repr(run(client))]
        except (LineclearError, TypeError) as error:
            result = [f"{type(error).__name__}: {error}"]
        for seen in transport.calls:
            seconds = None if seen.timeout_seconds is None else round(seen.timeout_seconds)
            result.append(str((seen.path, seen.message, seconds, seen.metadata)))
    return result


def stable(lines: list[str]) -> list[str]:
    """Replace random ids, addresses in memory and times."""
    return [re.sub(r"[0-9a-f]{32}|0x[0-9a-f]+|\d+\.\d{3,}", "*", line) for line in lines]


GENERATING: dict[str, Callable[..., Any]] = {
    "stream": lambda client, prompt, **given: client.stream(prompt, **given).read_all(),
    "generate": lambda client, prompt, **given: client.generate(prompt, **given),
    "submit": lambda client, prompt, **given: client.submit(prompt, **given).result(),
    "iter_batch": lambda client, prompt, **given: list(client.iter_batch([prompt], concurrency=1, **given)),
    "as_completed": lambda client, prompt, **given: list(client.as_completed([prompt], concurrency=1, **given)),
    "generate_batch": lambda client, prompt, **given: client.generate_batch([prompt], concurrency=1, **given),
}


PROMPT_CALLS: dict[str, tuple[Callable[..., Any], type]] = {
    "score": (lambda client, prompt, **given: client.score(prompt, [" c"], **given), ScoreParams),
    "embed": (lambda client, prompt, **given: client.embed([" c"], **given), EmbedParams),
}


def outcome(run: Callable[..., Any], name: str, *, is_given: bool, prompt: Any) -> list[str]:
    called: list[str] = []
    needs = dict(NEEDS.get(name, {}))
    value = (lambda _: called.append(name)) if name.startswith("on_") and VALUES[name] is None else VALUES[name]
    given = {**needs, name: value} if is_given else needs
    return stable(made(lambda client: run(client, prompt, **given))) + sorted(set(called))


def test_every_keyword_has_a_value() -> None:
    assert set(typing.get_type_hints(Params)) == VALUES.keys()
    assert set(typing.get_type_hints(ScoreParams)) < VALUES.keys()


@pytest.mark.parametrize("method", GENERATING)
def test_every_keyword_of_a_generating_method_has_an_effect(method: str) -> None:
    silent = []
    for name in VALUES:
        prompt = CHAT if name in CHAT_ONLY else "a b"
        plain, changed = (outcome(GENERATING[method], name, is_given=x, prompt=prompt) for x in (False, True))
        if name == "on_queued" and method != "submit":  # the fake transport sends no place, but the request asks for it
            assert "queue_position: true" in str(changed)
        elif plain == changed:
            silent.append(name)
        if name in CHAT_ONLY:
            assert "InvalidRequest" in outcome(GENERATING[method], name, is_given=True, prompt="a b")[0], name
    assert silent == []


@pytest.mark.parametrize("method", PROMPT_CALLS)
def test_every_keyword_of_a_prompt_call_has_an_effect_or_is_refused(method: str) -> None:
    run, known = PROMPT_CALLS[method]
    for name in VALUES.keys() - {"top_logprobs"}:  # an argument of its own
        prompt = CHAT if name in CHAT_ONLY else "a b"
        plain, changed = (outcome(run, name, is_given=x, prompt=prompt) for x in (False, True))
        assert plain != changed, name
        is_refused = f"TypeError: {method}() has no parameter" in changed[0]
        assert is_refused is (name not in typing.get_type_hints(known)), (name, changed)


def admin(run: Callable[[AdminClient], Any]) -> Callable[[Client], Any]:
    return lambda client: run(AdminClient(client))


def submitted(run: Callable[[Submitted], Any]) -> Callable[[Client], Any]:
    def with_one(client: Client) -> Any:
        return run(client.submit("a b", request_id="mine"))

    return with_one


def method_of(method: str, /, then: Callable[[Any], Any] = repr, **defaults: Any) -> Callable[..., Any]:
    """Return a call with `defaults`, which takes further arguments and then the object that has the method."""
    return lambda **given: lambda owner: then(getattr(owner, method)(**(defaults | given)))


def read(found: Any) -> Any:
    return found.read_all()


TIMEOUT = {"timeout_seconds": 5.0}
CASES: dict[type, dict[str, tuple[Callable[..., Any], dict[str, Any]]]] = {
    Client: {
        "score": (
            method_of("score", prompt="a b", continuations=[" c"]),
            {"top_logprobs": 2, "prompt": "b", "continuations": [" d"]},
        ),
        "score_batch": (
            method_of("score_batch", items=[("a b", [" c"])]),
            {"items": [("b", [" c"])]},
        ),
        "embed": (
            method_of("embed", inputs=["a"]),
            {"pooling": "mean", "normalize": False, "dimensions": 2, "inputs": ["b"]},
        ),
        "tokenize": (method_of("tokenize", prompt="a"), {"prompt": "b", **TIMEOUT}),
        "detokenize": (
            method_of("detokenize", token_ids=[65]),
            {"token_ids": [66], "keep_special_tokens": True, **TIMEOUT},
        ),
        "model": (method_of("model"), TIMEOUT),
        "stats": (method_of("stats"), TIMEOUT),
        "health": (method_of("health"), {"service": "readiness", **TIMEOUT}),
        "cancel": (method_of("cancel", request_id="mine"), {"request_id": "other", "index": 1, **TIMEOUT}),
        "submitted": (
            method_of("submitted", then=lambda one: one.cancel(), request_id="mine"),
            {"request_id": "other", "metadata": {"a": "b"}},
        ),
    },
    Submitted: {
        "attach": (method_of("attach", then=read), {"from_index": 1, **TIMEOUT}),
        "result": (method_of("result"), TIMEOUT),
        "poll": (method_of("poll"), TIMEOUT),
        "cancel": (method_of("cancel"), {"index": 1, **TIMEOUT}),
    },
    AdminClient: {
        "restart_workers": (method_of("restart_workers"), TIMEOUT),
        "set_log_level": (method_of("set_log_level", level="info"), {"level": "error"}),
        "update_scheduling": (method_of("update_scheduling"), {"max_queue_size": 3}),
        "load_adapter": (method_of("load_adapter", name="a", path="b"), {"name": "c", "path": "d", **TIMEOUT}),
        "profile": (method_of("profile"), {"num_steps": 3, "worker": 1, "max_seconds": 2.0}),
        "unload_adapter": (method_of("unload_adapter", name="a"), {"name": "b"}),
        "watch_steps": (
            method_of("watch_steps", then=list),
            {"history": 3, "min_interval_seconds": 1.0, "include_state": True, "include_block_map": True},
        ),
    },
}
ELSEWHERE = {("Submitted", "on_queued"), *(("Client", name) for name in ("target", "credentials", "options"))}
ELSEWHERE |= {("Client", "transport"), ("Client", "sessions"), ("Client", "return_exceptions")}
"""Arguments whose effect needs more than a recorded call. Tests of queue notices, channels, sessions and batches have
them."""


def arguments() -> Iterator[tuple[type, str, str]]:
    for owner in (Client, Submitted, AdminClient):
        for name, function in inspect.getmembers(owner, inspect.isfunction):
            if name.startswith("_") or name in GENERATING:
                continue
            for parameter in list(inspect.signature(function).parameters)[1:]:
                if parameter != "params" and (owner.__name__, parameter) not in ELSEWHERE:
                    yield owner, name, "max_queue_size" if parameter == "changes" else parameter


@pytest.mark.parametrize(("owner", "method", "argument"), list(arguments()))
def test_every_argument_has_an_effect(owner: type, method: str, argument: str) -> None:
    call, values = CASES[owner][method]
    wrap: Callable[..., Any] = {AdminClient: admin, Submitted: submitted}.get(owner, lambda run: run)
    changed = made(wrap(call(**{argument: values[argument]})))
    assert "TypeError" not in changed[0]
    assert stable(made(wrap(call()))) != stable(changed)


SETTINGS: dict[str, Any] = {
    "token": "secret", "metadata": {"a": "b"}, "timeout_seconds": 5.0, "sampling": Sampling(top_k=3),
    "max_attempts": 1, "on_model_change": "restart",
}  # fmt: skip


def settings() -> Iterator[str]:
    for name in [*list(inspect.signature(Client.__init__).parameters)[1:-1], *ConfigArguments.__annotations__]:
        if ("Client", name) not in ELSEWHERE:
            yield name


@pytest.mark.parametrize("name", [*settings()])
def test_every_setting_of_a_client_has_an_effect(name: str) -> None:
    def run(**given: Any) -> list[str]:
        replies = [Answer(pieces=("a",), error=ModelChanged("another model"))] if name == "on_model_change" else []
        transport = FakeTransport([*replies, QueueFull("full", retry_after_seconds=0.0), "a b"])
        with Client(transport=transport, **given) as client:
            try:
                text = client.generate("a b").text
            except LineclearError as error:
                text = str(error)
            return [text, *(str((c.message, round(c.timeout_seconds or 0), c.metadata)) for c in transport.calls)]

    value = RetryPolicy(max_attempts=1) if name == "retry" else SETTINGS[name]
    assert stable(run()) != stable(run(**{name: value}))


def test_both_kinds_of_clients_have_the_same_arguments() -> None:
    for one, other in ((Client, AsyncClient), (AdminClient, AsyncAdminClient)):
        for name, function in inspect.getmembers(one, inspect.isfunction):
            if not name.startswith("__"):
                ours, theirs = (
                    list(inspect.signature(f).parameters) for f in (function, getattr(other, name, None)) if f
                )
                assert ours == theirs, name
