"""Hostile callers whose requests are many, large, or expensive to check, render, tokenize, compile, score or step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from campaigns.hostile_target import (
    KINDS,
    METHODS,
    NUM_THREADS,
    SERVED,
    SLOW,
    Kind,
    Target,
    counted,
    in_threads,
    kind,
    served,
)
from google.protobuf.message import Message

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def _conversation(first: str, messages: int = 1) -> pb.ChatMessages:
    contents = [first, *[""] * (messages - 1)]
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def _with_tools() -> pb.TokenizeRequest:
    """Return a conversation with as many and as large tools as a request may have."""
    fields = {f"field_{number}": {"type": "string", "description": "quick brown " * 5} for number in range(32)}
    schema = json.dumps({"type": "object", "properties": fields})
    chat = _conversation("")
    for number in range(128):
        chat.tools.add(name=f"tool_{number}", description="quick", parameters=schema)
    return pb.TokenizeRequest(chat=chat)


def _form(structured_output: dict[str, Any], **sampling: Any) -> pb.GenerateRequest:
    sampling = {"max_tokens": 200, "structured_output": structured_output, **sampling}
    return pb.GenerateRequest(text="x", sampling=sampling)


_LEXER_HEAVY = "|".join(f"[a-z ]*{chr(97 + i)}[a-z ]{{{5 + i}}}{chr(97 + i)}" for i in range(12))
_ALL_BEAMS: dict[str, Any] = {"num_beams": 32, "max_tokens": 400, "min_tokens": 399, "early_stopping": 3}
_ONE_TOKEN = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[5]),
    output=pb.OutputOptions(logprobs=True, top_logprobs=20),
    sampling={"max_tokens": 64, "ignore_eos": True},
)
_REQUESTS: dict[str, tuple[str, Message]] = {
    # Conversations with very many messages, and ones that the template renders slowly.
    "template_flood": ("Tokenize", pb.TokenizeRequest(chat=_conversation("", 1024))),
    "slow_template": ("Tokenize", pb.TokenizeRequest(chat=_conversation(SLOW))),
    "tool_lists": ("Tokenize", _with_tools()),
    # About the longest text and token list that the server accepts.
    "tokenize_flood": ("Tokenize", pb.TokenizeRequest(text="quick brown " * 40_000)),
    "detokenize_flood": ("Detokenize", pb.DetokenizeRequest(token_ids=[300] * 65_000)),
    # A grammar whose work grows with each token, and a regular expression near the bound of the work of a mask.
    "ambiguous_grammars": ("Generate", _form({"grammar": 'start: "x" a\na: a a | a a a | a a a a | /[a-z ]/'})),
    "lexer_heavy_forms": ("Generate", _form({"regex": f"({_LEXER_HEAVY}).*"}, temperature=1)),
    # As many beams and end ids as the server accepts, up to the end.
    "beam_searches": (
        "Generate",
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[9, 10]),
            sampling=_ALL_BEAMS,
            stop={"token_ids": range(100, 116), "eos_token_ids": range(200, 216)},
        ),
    ),
    # Many outputs that end at the most expensive stop regex.
    "stop_regexes": (
        "Generate",
        pb.GenerateRequest(
            text="quick brown",
            sampling={"max_tokens": 200, "n": 24, "ignore_eos": True},
            stop={"regex": "[^z]{8,16}z{9}"},
        ),
    ),
    # All log probabilities, and answers that nothing reads.
    "unread_answers": ("Submit", pb.SubmitRequest(request=_ONE_TOKEN)),
}
_IN_ONE_THREAD = {"beam_searches", "stop_regexes"}


def _repeated(name: str) -> Kind:
    method, request = _REQUESTS[name]
    options = {"timeout": 5} if name == "slow_template" else {}

    def call(stub: Any) -> None:
        answer = getattr(stub, method)(request, **options)
        if method == "Generate":
            list(answer)

    return lambda target: in_threads(target, call, 1 if name in _IN_ONE_THREAD else NUM_THREADS)


KINDS.update({name: _repeated(name) for name in _REQUESTS})
SERVED.update({*_REQUESTS} - {"slow_template"})


def _after_long_prompt(target: Target, make: Callable[[Any, int], pb.GenerateRequest]) -> int:
    """Repeat a request that is made for the model and a length that its context holds."""
    with target.channel() as channel:
        model = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
    request = make(model, min(7000, model.context_length - 64))
    return in_threads(target, lambda stub: list(stub.Generate(request)))


@served
def resume_flood(target: Target) -> int:
    """Resume requests after about as many tokens as the context holds, with stop strings."""

    def make(model: Any, length: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5]),
            sampling={"max_tokens": length + 1, "seed": 1, "ignore_eos": True},
            stop={"strings": ["zyxwvut" * 9] * 8},
            resume=pb.Resume(token_ids=[300] * length, model_fingerprint=model.model_fingerprint),
        )

    return _after_long_prompt(target, make)


@served
def repetition_penalties(target: Target) -> int:
    """Ask for DRY over the longest prompt of one token, with as many breakers as the server accepts."""
    dry = {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
    breakers = ["quick brown " * 4 + str(number) for number in range(16)]

    def make(model: Any, length: int) -> pb.GenerateRequest:
        sampling = {"max_tokens": 60, "ignore_eos": True, "dry_sequence_breakers": breakers, **dry}
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * length), sampling=sampling)

    return _after_long_prompt(target, make)


@kind
async def cancel_storm(target: Target) -> int:
    """Cancel requests right after sending them, by Generate and over a Session."""
    count = 0
    data = pb.GenerateRequest(text="quick brown " * 20, sampling={"max_tokens": 400}).SerializeToString()

    async def calls() -> None:
        nonlocal count
        async with target.channel(aio=True) as channel:
            generate = channel.unary_stream((METHODS + b"Generate").decode())
            while not (count and target.is_over):
                call = generate(data)
                count += 1
                await asyncio.sleep(0.002 * (count % 7 == 0))
                call.cancel()

    async def commands() -> None:
        nonlocal count
        request = pb.GenerateRequest(text="quick brown", sampling={"max_tokens": 400})
        async with target.channel(aio=True) as channel:
            session = inference_pb2_grpc.InferenceServiceStub(channel).Session()

            async def read() -> None:
                with contextlib.suppress(grpc.RpcError):
                    while await session.read() is not grpc.aio.EOF:
                        pass

            reader = asyncio.ensure_future(read())
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                while not target.is_over:
                    handles = range(count, count + 16)
                    count += 16
                    await session.write(
                        pb.SessionRequest(
                            submits=[pb.SubmitCommand(handle=handle, request=request) for handle in handles],
                            cancels=[pb.CancelCommand(handle=handle) for handle in handles],
                        )
                    )
                    await asyncio.sleep(0.002)
            reader.cancel()

    await asyncio.gather(*(calls() for _ in range(NUM_THREADS)), commands())
    return count


@kind
def oversized_requests(target: Target) -> int:
    """Send requests above the size limit, in a Session and by Generate."""
    request = pb.GenerateRequest(text="x" * 5_000_000)
    return _by_generate_and_session(target, request, num_commands=1)


@kind
def heavy_requests(target: Target) -> int:
    """Send requests with every list at its limit, most of them invalid in the last field."""
    sampling = {
        "allowed_token_ids": list(range(400)) * 10,
        "banned_token_ids": [500] * 4096,
        "logit_bias": [{"token_id": token, "bias": 1.0} for token in range(300)],
        "top_p": 7.0,
    }
    stop = {"strings": ["abcdefgh" * 7 + str(n) for n in range(8)]}
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 8000), sampling=sampling, stop=stop)
    return _by_generate_and_session(target, request, num_commands=32)


def _by_generate_and_session(target: Target, request: pb.GenerateRequest, num_commands: int) -> int:
    """Repeat a request, and a session whose first message has `num_commands` of them."""
    submits = [pb.SubmitCommand(handle=handle, request=request) for handle in range(1, num_commands + 1)]

    def call(stub: Any) -> None:
        with counted():
            list(stub.Generate(request))
        list(stub.Session(iter([pb.SessionRequest(submits=submits)])))

    return in_threads(target, call)


@kind
def form_flood(target: Target) -> int:
    """Send forms that take long to compile, each a new one: slow, of many states, large."""
    numbers = itertools.count(os.getpid() * 100_000)

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        number = next(numbers)
        schemas: tuple[Any, ...] = (
            {"type": "integer", "multipleOf": 9_000_000 + number % 999_999},
            {"type": "string", "pattern": f"^((a{{1,{number % 900 + 1}}}b?){{1,999}}c?){{1,999}}$"},
            {"enum": [f"{number}{entry}" for entry in range(12_000)]},
        )
        list(stub.Generate(_form({"json_schema": json.dumps(schemas[number % len(schemas)])}, max_tokens=1)))

    return in_threads(target, call)


@served
def slow_forms(target: Target) -> int:
    """Send forms that are compiled within the limits, each a new one that takes some of them."""
    numbers = itertools.count(os.getpid() * 100_000)

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        names = [f"k{next(numbers)}_{entry}" for entry in range(300)]
        pattern = {"type": "string", "pattern": "^[a-z]{1,50}$"}
        schema = {"anyOf": [{"type": "object", "properties": {name: pattern}, "required": [name]} for name in names]}
        list(stub.Generate(_form({"json_schema": json.dumps(schema)}, max_tokens=1)))

    return in_threads(target, call)


@served
def embed_flood(target: Target) -> int:
    """Ask for the vectors of 64 inputs of 128 tokens, each a new one."""
    rng = random.Random(os.getpid())

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=[rng.randrange(500) for _ in range(128)])) for _ in range(64)]
        stub.Embed(pb.EmbedRequest(inputs=inputs))

    return in_threads(target, call)


@served
def score_flood(target: Target) -> int:
    """Score 128 continuations of 90 words, with the 20 most likely tokens at each place."""
    rng = random.Random(os.getpid())
    words = ("quick", "brown", "fox", "jumps", "over", "dogs")

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        texts = [" ".join(rng.choice(words) for _ in range(90)) for _ in range(128)]
        continuations = [pb.Continuation(text=text) for text in texts]
        stub.Score(pb.ScoreRequest(text="once upon a time", continuations=continuations, top_logprobs=20))

    return in_threads(target, call)
