"""Each field of each request message has an effect or an error.

`CASES` has, for each field, a request without it and what sets it, in protobuf's text format. The two must be seen to
differ: in the responses, in what the engine gets, or in the settings. A field without a case fails.
"""

# ruff: noqa: E501  # a case has one line

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor, message_factory, text_format
from support.serving import BOUND_SECONDS, Serving
from support.small_tokenizers import save
from support.sources import REPOSITORY
from support.tool_answers import TOKENIZER, larger_serving
from support.tool_templates import tokenizer as with_markers

from lineclear.errors import KvCapacityExceeded
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.core.sequence import Request
from lineclear.status_codec import TRAILER, from_trailer
from lineclear.v1 import admin_pb2, inference_pb2

METHODS = {
    method.name: method
    for file in (inference_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
GENERATE = inference_pb2.GenerateRequest.DESCRIPTOR
TEMPLATE = (
    "{% if 'tool' == 1 %}{% endif %}{{ strftime_now('%Y') }}"
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def chat(message: str = 'role: "user" content: "hi"', more: str = "") -> str:
    return f"chat {{ messages {{ {message} }} {more} }} "


TOOL = 'tools { name: "add" } '
CHAT = {
    "messages.role": (chat(), chat('role: "assistant" content: "hi"')),
    "messages.content": (chat(), chat('role: "user" content: "ho"')),
    "messages.tool_calls.id": tuple(chat(f'role: "assistant" tool_calls {{ id: "{i}" name: "f" arguments: "{{}}" }}') for i in "ab"),
    "messages.tool_calls.name": tuple(chat(f'role: "assistant" tool_calls {{ id: "a" name: "{i}" arguments: "{{}}" }}') for i in "fg"),
    "messages.tool_calls.arguments": tuple(chat(f'role: "assistant" tool_calls {{ id: "a" name: "f" arguments: "{i}" }}') for i in ("{}", '{\\"b\\": 1}')),
    "messages.tool_call_id": (chat('role: "tool" content: "1"'), chat('role: "tool" content: "1" tool_call_id: "a"')),
    "messages.name": (chat(), chat('role: "user" content: "hi" name: "eve"')),
    "messages.reasoning": (chat('role: "assistant"'), chat('role: "assistant" reasoning: "well"')),
    "add_generation_prompt": (chat(), chat(more="add_generation_prompt: false")),
    "tools.name": (chat(more=TOOL), chat(more='tools { name: "sub" }')),
    "tools.description": (chat(more=TOOL), chat(more='tools { name: "add" description: "plus" }')),
    "tools.parameters": (chat(more=TOOL), chat(more="tools { name: \"add\" parameters: '{\"properties\": {\"a\": {}}}' }")),
    "tool_choice.mode": (chat(more=TOOL), chat(more=TOOL + "tool_choice { mode: TOOL_CHOICE_MODE_NONE }")),
    "tool_choice.function": (chat(more=TOOL), chat(more=TOOL + 'tool_choice { function: "add" }')),
    "parallel_tool_calls": (chat(more=TOOL), chat(more=TOOL + "parallel_tool_calls: false")),
}  # fmt: skip

TEXT = 'text: "quick brown" request_id: "%ID%" '
SAMPLED = TEXT + "sampling { seed: 7 } "
RESUMED = SAMPLED + 'resume { token_ids: 40 model_fingerprint: "0123456789abcdef" } '
BRANCHES = TEXT + "sampling { seed: 7 n: 2 } "
FORM = TEXT + "sampling { seed: 7 structured_output { json_object: true } } "
REPEATED = SAMPLED + "stop { repetition_detection { max_pattern_size: 2 min_count: 3 } } "


def sampling(text: str) -> tuple[str, str]:
    return SAMPLED, SAMPLED.replace("seed: 7", f"seed: 7 {text}")


def output(text: str, before: str = SAMPLED) -> tuple[str, str]:
    return before, before + f"output {{ {text} }}"


SCALARS = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "allowed_token_ids": 5, "banned_token_ids": 5, "min_tokens": 2, "max_tokens": 3,
    "ignore_eos": "true", "bad_words": '"brown"', "begin_banned_token_ids": 5, "forced_first_token_id": 5,
    "no_repeat_ngram_size": 3, "exponential_decay_start": 3, "exponential_decay_factor": 1.5, "typical_p": 0.5,
    "top_n_sigma": 1, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dynatemp_range": 0.5, "dynatemp_exponent": 2,
    "dry_multiplier": 1, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 9, "n": 2, "best_of": 2,
}  # fmt: skip
GENERATE_CASES = {
    "request_id": (SAMPLED, 'text: "quick brown" request_id: "%ID%b" sampling { seed: 7 }'),
    "text": (SAMPLED, SAMPLED.replace("brown", "fox")),
    "token_ids.ids": tuple(SAMPLED.replace('text: "quick brown"', f"token_ids {{ ids: {i} }}") for i in (40, 41)),
    **{f"chat.{path}": tuple(SAMPLED.replace('text: "quick brown"', text) for text in case) for path, case in CHAT.items()},
    **{f"sampling.{name}": sampling(f"{name}: {value}") for name, value in SCALARS.items()},
    "sampling.seed": (SAMPLED, SAMPLED.replace("seed: 7", "seed: 8")),
    "sampling.dry_sequence_breakers": (sampling("dry_multiplier: 1")[1], sampling('dry_multiplier: 1 dry_sequence_breakers: "x"')[1]),
    "sampling.logit_bias.token_id": tuple(sampling(f"logit_bias {{ token_id: {i} bias: 1 }}")[1] for i in (5, 6)),
    "sampling.logit_bias.bias": tuple(sampling(f"logit_bias {{ token_id: 5 bias: {i} }}")[1] for i in (1, 2)),
    "sampling.structured_output.json_schema": (SAMPLED, FORM.replace("json_object: true", "json_schema: '{\"type\": \"integer\"}'")),
    "sampling.structured_output.json_object": (SAMPLED, FORM),
    "sampling.structured_output.regex": (SAMPLED, FORM.replace("json_object: true", 'regex: "a+"')),
    "sampling.structured_output.choice.texts": (SAMPLED, FORM.replace("json_object: true", 'choice { texts: "a" }')),
    "sampling.structured_output.grammar": (SAMPLED, FORM.replace("json_object: true", "grammar: 'start: \"a\"'")),
    "sampling.structured_output.json_whitespace": (FORM, FORM.replace("true", "true json_whitespace: JSON_WHITESPACE_ANY")),
    "sampling.structured_output.constraint_start": (FORM, FORM.replace("true", 'true constraint_start: "go"')),
    "stop.strings": (SAMPLED, SAMPLED + 'stop { strings: "how" }'),
    "stop.token_ids": (SAMPLED, SAMPLED + "stop { token_ids: 5 }"),
    "stop.include_stop_string": (SAMPLED + 'stop { strings: "how" }', SAMPLED + 'stop { strings: "how" include_stop_string: true }'),
    "stop.eos_token_ids": (SAMPLED, SAMPLED + "stop { eos_token_ids: 5 }"),
    "stop.repetition_detection.max_pattern_size": (SAMPLED + "sampling { max_tokens: 90 }", REPEATED + "sampling { max_tokens: 90 }"),
    "stop.repetition_detection.min_pattern_size": tuple(REPEATED.replace("min_count", f"min_pattern_size: {i} min_count") + "sampling { max_tokens: 90 }" for i in (1, 2)),
    "stop.repetition_detection.min_count": (REPEATED + "sampling { max_tokens: 90 }", REPEATED.replace("min_count: 3", "min_count: 9") + "sampling { max_tokens: 90 }"),
    "stop.regex": (SAMPLED, SAMPLED + 'stop { regex: "h.w" }'),
    "priority": (SAMPLED, SAMPLED + "priority: 3"),
    "output.omit_text": output("omit_text: true"),
    "output.logprobs": output("logprobs: true"),
    "output.top_logprobs": output("top_logprobs: 2"),
    "output.keep_special_tokens": output("keep_special_tokens: true"),
    "output.token_timings": output("token_timings: true"),
    "output.queue_position": output("queue_position: true"),
    "output.prompt_logprobs": output("prompt_logprobs: 1"),
    "output.logprob_token_ids": output("logprob_token_ids: 5"),
    "output.echo": output("echo: true"),
    "resume.token_ids": (RESUMED, RESUMED.replace("token_ids: 40", "token_ids: 41")),
    "resume.model_fingerprint": (RESUMED, RESUMED.replace("0123", "4567")),
    "resume.prompt_digest": (RESUMED, RESUMED.replace("resume {", 'resume { prompt_digest: "feed"')),
    "resume.chat_time_us": tuple(RESUMED.replace('text: "quick brown"', chat()).replace("resume {", f"resume {{ chat_time_us: {i}000000000000000") for i in (1, 2)),
    "resume.outputs.token_ids": tuple(BRANCHES + f'resume {{ outputs {{ token_ids: {i} }} outputs {{}} model_fingerprint: "0123456789abcdef" }}' for i in (40, 41)),
    "resume.outputs.is_complete": tuple(BRANCHES + f'resume {{ outputs {{ is_complete: {i} }} outputs {{}} model_fingerprint: "0123456789abcdef" }}' for i in ("false", "true")),
    "cache_salt": (SAMPLED, SAMPLED + 'cache_salt: "x"'),
    "model": (SAMPLED, SAMPLED + 'model: "another"'),
    "model_fingerprint": (SAMPLED, SAMPLED + 'model_fingerprint: "another"'),
    "expected_tokens": (SAMPLED, SAMPLED + "expected_tokens: 3"),
    "adapter": (SAMPLED, SAMPLED + 'adapter: "another"'),
    "truncate_prompt_tokens": (SAMPLED, SAMPLED + "truncate_prompt_tokens: 2"),
    "num_speculative_tokens": (SAMPLED, SAMPLED + "num_speculative_tokens: 0"),
}  # fmt: skip

REFUSED = {"Score.chat.tool_choice.function", "Score.chat.parallel_tool_calls"}
"""Fields of a shared message that have no meaning for one method, which refuses them."""
WITHOUT_EFFECT = {
    "Tokenize.chat.tool_choice.function": "the prompt is that of Generate, which takes the same message",
    "Tokenize.chat.parallel_tool_calls": "the same",
}
ELSEWHERE = {
    "Generate.sampling.num_beams": ("tests/e2e/test_sampling_parameters.py", "num_beams="),
    "Generate.sampling.length_penalty": ("tests/e2e/test_sampling_parameters.py", "length_penalty="),
    "Generate.sampling.early_stopping": ("tests/e2e/test_sampling_parameters.py", "early_stopping="),
    "WatchSteps.history": ("tests/grpc_api/test_watch_steps.py", "history="),
    "WatchSteps.min_interval": ("tests/grpc_api/test_watch_steps.py", "min_interval_seconds="),
    "WatchSteps.include_state": ("tests/grpc_api/test_watch_steps.py", "include_state="),
    "WatchSteps.include_block_map": ("tests/grpc_api/test_watch_steps.py", "include_block_map="),
    "LoadAdapter.name": ("tests/process/test_adapters.py", "load_adapter("),
    "LoadAdapter.path": ("tests/process/test_adapters.py", "load_adapter("),
    "UnloadAdapter.name": ("tests/process/test_adapters.py", "unload_adapter("),
}
"""Fields whose effect another file tests: with a model, real steps, or the files of an adapter."""

SCORED = 'text: "quick brown" continuations { text: " fox" } '
EMBEDDED = 'inputs { text: "quick brown" } '
SUBMITTED = (("Submit", f"request {{ {SAMPLED} }}"),)
BRANCHED = (("Submit", f"request {{ {BRANCHES} }}"),)
HELD = TEXT + "sampling { seed: 7 max_tokens: 77 n: 2 }"


def of_prompt(base: str) -> dict[str, tuple[str, str]]:
    return {
        "priority": (base, base + "priority: 3"),
        "cache_salt": (base, base + 'cache_salt: "x"'),
        "model": (base, base + 'model: "another"'),
        "model_fingerprint": (base, base + 'model_fingerprint: "another"'),
        "adapter": (base, base + 'adapter: "another"'),
        "truncate_prompt_tokens": (base, base + "truncate_prompt_tokens: 2"),
    }


CASES: dict[str, dict[str, tuple[Any, ...]]] = {
    "Generate": GENERATE_CASES,
    "Session": {
        "submits.handle": tuple(f"submits {{ handle: {i} request {{ {SAMPLED} }} }}" for i in (1, 2)),
        "submits.request": tuple(f"submits {{ handle: 1 request {{ {i} }} }}" for i in (SAMPLED, SAMPLED + "priority: 3")),
        "submits.timeout": tuple(f"submits {{ handle: 1 request {{ {SAMPLED} }} timeout {{ seconds: {i} }} }}" for i in (90, 9)),
        "submits.tenant": tuple(f'submits {{ handle: 1 request {{ {SAMPLED} }} tenant: "{i}" }}' for i in "ab"),
        "cancels.handle": tuple(f"submits {{ handle: 1 request {{ {HELD} }} }} cancels {{ handle: {i} }}" for i in (2, 1)),
        "cancels.index": tuple(f"submits {{ handle: 1 request {{ {HELD} }} }} cancels {{ handle: 1 {i} }}" for i in ("", "index: 1")),
    },
    "Submit": {
        "request": tuple(f"request {{ {i} }}" for i in (SAMPLED, SAMPLED + "priority: 3")),
        "timeout": tuple(f"request {{ {SAMPLED} }} timeout {{ seconds: {i} }}" for i in (90, 9)),
    },
    "Attach": {
        "request_id": ('request_id: "%ID%"', 'request_id: "another"', SUBMITTED),
        "from_index": ('request_id: "%ID%"', 'request_id: "%ID%" from_index: 2', SUBMITTED),
        "more_from_indexes": ('request_id: "%ID%"', 'request_id: "%ID%" more_from_indexes: 2', BRANCHED),
    },
    "GetResult": {"request_id": ('request_id: "%ID%"', 'request_id: "another"', SUBMITTED)},
    "Cancel": {
        "request_id": ('request_id: "%ID%"', 'request_id: "another"', SUBMITTED),
        "index": ('request_id: "%ID%"', 'request_id: "%ID%" index: 1'  , (("Submit", f"request {{ {HELD} }}"),)),
    },
    "Score": {
        "text": (SCORED, SCORED.replace("brown", "red")),
        "token_ids.ids": tuple(SCORED.replace('text: "quick brown"', f"token_ids {{ ids: {i} }}") for i in (40, 41)),
        **{f"chat.{path}": tuple(SCORED.replace('text: "quick brown"', text) for text in case) for path, case in CHAT.items()},
        "continuations.text": (SCORED, SCORED.replace("fox", "dog")),
        "continuations.token_ids.ids": tuple(SCORED + f"continuations {{ token_ids {{ ids: {i} }} }}" for i in (40, 41)),
        "top_logprobs": (SCORED, SCORED + "top_logprobs: 3"),
        **of_prompt(SCORED),
    },
    "Embed": {
        "inputs.text": (EMBEDDED, EMBEDDED.replace("brown", "red")),
        "inputs.token_ids.ids": tuple(f"inputs {{ token_ids {{ ids: {i} }} }}" for i in (40, 41)),
        "pooling": (EMBEDDED, EMBEDDED + "pooling: POOLING_MEAN"),
        "normalize": (EMBEDDED, EMBEDDED + "normalize: false"),
        "dimensions": (EMBEDDED, EMBEDDED + "dimensions: 2"),
        **of_prompt(EMBEDDED),
    },
    "Tokenize": {
        "text": ('text: "a"', 'text: "b"'),
        **{f"chat.{path}": case for path, case in CHAT.items()},
    },
    "Detokenize": {
        "token_ids": ("token_ids: 40", "token_ids: 41"),
        "keep_special_tokens": ("token_ids: 1 token_ids: 40", "token_ids: 1 token_ids: 40 keep_special_tokens: true"),
    },
    "Profile": {
        "num_steps": ("", "num_steps: 7"),
        "max_duration": ("", "max_duration { seconds: 3 }"),
        "worker": ("", "worker: 1"),
    },
    "SetLogLevel": {"level": ("level: LOG_LEVEL_INFO", "level: LOG_LEVEL_ERROR")},
    "UpdateScheduling": {
        f"changes.{name}": ("", f"changes {{ {name}: {value} }}")
        for name, value in {
            "batching_strategy": '"adaptive"', "scheduling_policy": '"fair"', "preemption_policy": '"newest"',
            "max_batch_size": 4, "min_batch_size": 2, "target_batch_tokens": 99, "batch_timeout_ms": 7,
            "target_inter_token_latency_ms": 77, "max_prefill_slowdown": 3, "priority_aging_seconds": 7,
            "max_queue_size": 77, "max_queue_tokens": 7777, "max_queue_size_per_tenant": 7,
            "max_queue_tokens_per_tenant": 777,
        }.items()
    },
}  # fmt: skip


def leaves(message: descriptor.Descriptor, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields that are no messages of lineclear. GenerateRequest inside another is one field."""
    for field in message.fields:
        inner = field.message_type
        if inner is not None and inner.file.package == "lineclear.v1" and inner is not GENERATE:
            yield from leaves(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_field_has_a_case() -> None:
    here = {f"{method}.{path}" for method, cases in CASES.items() for path in cases} | ELSEWHERE.keys()
    every = {f"{name}.{path}" for name, method in METHODS.items() for path in leaves(method.input_type)}
    assert (every - here, here - every) == (set(), set())
    for file, word in ELSEWHERE.values():
        assert word in (REPOSITORY / file).read_text()


NUMBERS = count()


async def outcome(s: Serving, admin: Any, method: str, text: str, setup: Sequence[tuple[str, str]]) -> str:
    """Return what can be seen of a call: the responses or the error, what the engine gets, and what is cancelled."""
    name = f"q{next(NUMBERS)}"
    is_held = "max_tokens: 77" in text + str(setup)
    s.engine.answer = None if is_held else answer
    for earlier, request in setup:
        await call(s.channel, earlier, request.replace("%ID%", name))
    first, cancelled, operated = len(s.engine.submitted), len(s.engine.cancelled), len(s.operations.calls)
    channel = admin if METHODS[method].containing_service.name == "AdminService" else s.channel
    release = asyncio.create_task(finish_all(s)) if is_held else None
    responses = await call(channel, method, text.replace("%ID%", name))
    if release is not None:
        await release
    submitted = [seen(request) for request in s.engine.submitted[first:]]
    return str((responses, submitted, len(s.engine.cancelled) - cancelled, s.operations.calls[operated:])).replace(
        name, "ID"
    )


CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def answer(request: Request) -> Sequence[int]:
    text = "now" * 20 if request.max_tokens == 90 else " how now " + 2 * CALL
    return TOKENIZER.encode_sealed(TOKENIZER.seal("<s>") + text)[: request.max_tokens]


async def finish_all(s: Serving) -> None:
    """End the held requests that are not cancelled by then."""
    await asyncio.sleep(0.3)
    for key in list(s.engine.requests):
        s.engine.start(key)
        s.engine.finish_by(key, FinishReason.LENGTH)


async def call(channel: Any, method: str, text: str) -> list[str]:
    """Return the responses, without times, and the error."""
    described = METHODS[method]
    request, response = (message_factory.GetMessageClass(d) for d in (described.input_type, described.output_type))
    path = f"/{described.containing_service.full_name}/{method}"
    message = text_format.Merge(text, request())
    coding = {"request_serializer": request.SerializeToString, "response_deserializer": response.FromString}
    if method == "Session":
        running = channel.stream_stream(path, **coding)(iter([message]), timeout=BOUND_SECONDS)
    else:
        running = channel.unary_stream(path, **coding)(message, timeout=BOUND_SECONDS)
    found = []
    try:
        async for part in running:
            drop_times(part)
            found.append(str(part))
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        known = from_trailer(error.code().name, error.details() or "", trailers.get(TRAILER))
        found.append(f"{known.reason} {known}")
    return found


TIMES = {"timings", "timeout", "chat_time_us", "queue_time"}


def drop_times(message: Any) -> None:
    for field, value in message.ListFields():
        if field.name in TIMES:
            message.ClearField(field.name)
        elif field.name == "token_times_us":
            value[:] = [0] * len(value)
        elif field.type == field.TYPE_MESSAGE:
            for entry in value if hasattr(value, "add") else [value]:
                drop_times(entry)


def seen(request: Request) -> dict[str, Any]:
    found = {field.name: getattr(request, field.name) for field in fields(request)}
    found["request_id"] = request.request_id.partition("~")[0]
    found["deadline"] = request.deadline and round((request.deadline - monotonic()) / 10)
    found["queued_since"] = request.queued_since is not None
    if request.scoring or request.pooling:  # one of several requests of a call: id and seed are random
        found |= {"request_id": "", "sampling": replace(request.sampling, seed=0)}
    return found


@pytest.mark.parametrize("method", CASES)
async def test_every_field_has_an_effect_or_an_error(tmp_path: Path, method: str) -> None:
    model = save(tmp_path / "model", with_markers())
    options = {"template": TEMPLATE, "tokenizer": TOKENIZER, "model": model, "tool_call_parser": "hermes"}
    options |= {"speculative_method": "prompt_lookup", "num_speculative_tokens": 4, "output_length_estimator": "none"}
    async with (
        larger_serving(tmp_path, admin_listen=f"unix:{tmp_path}/a", **options) as s,
        grpc.aio.insecure_channel(s.server.admin_address) as admin,
    ):
        if method in ("Score", "Embed"):  # the fake engine has no scores
            s.engine.refusal = KvCapacityExceeded("no")
        wrong = {}
        for path, case in CASES[method].items():
            before, after, setup = (*case, ())[:3]
            plain = await outcome(s, admin, method, before, setup)
            changed = await outcome(s, admin, method, after, setup)
            name = f"{method}.{path}"
            if (plain != changed) is (name in WITHOUT_EFFECT):
                wrong[name] = "no effect" if plain == changed else "an effect"
            elif "INVALID_REQUEST" in plain or ("INVALID_REQUEST" in changed) is not (name in REFUSED):
                wrong[name] = f"{plain} {changed}"
            elif method != "UpdateScheduling" and plain != await outcome(s, admin, method, before, setup):
                wrong[name] = "two equal calls differ"
        assert not wrong, "\n".join(map(": ".join, wrong.items()))
