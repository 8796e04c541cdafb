"""Hostile callers whose requests are expensive to check, render, tokenize, compile or score."""

from __future__ import annotations

import itertools
import json
import os
import random
from typing import Any

from campaigns.hostile_target import SLOW, Target, in_threads

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def _conversation(first: str, messages: int) -> pb.ChatMessages:
    contents = [first, *[""] * (messages - 1)]
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def template_flood(target: Target) -> int:
    """Send conversations with very many messages."""
    request = pb.TokenizeRequest(chat=_conversation("", int(os.environ.get("HOSTILE_MESSAGES", "1024"))))
    return in_threads(target, lambda stub: stub.Tokenize(request))


def slow_template(target: Target) -> int:
    """Send conversations that the template renders slowly."""
    request = pb.TokenizeRequest(chat=_conversation(SLOW, 1))
    return in_threads(target, lambda stub: stub.Tokenize(request, timeout=5))


def detokenize_flood(target: Target) -> int:
    """Detokenize as many tokens as the server accepts."""
    request = pb.DetokenizeRequest(token_ids=[300] * int(os.environ.get("HOSTILE_TOKENS", "65000")))
    return in_threads(target, lambda stub: stub.Detokenize(request))


def tokenize_flood(target: Target) -> int:
    """Tokenize the longest text that the server accepts."""
    request = pb.TokenizeRequest(text="quick brown " * 40_000)
    return in_threads(target, lambda stub: stub.Tokenize(request))


def resume_flood(target: Target) -> int:
    """Resume requests after as many tokens as the context holds, with stop strings."""
    with target.channel() as channel:
        model = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
    length = min(7000, model.context_length - 2)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]),
        sampling={"max_tokens": length + 1, "seed": 1, "ignore_eos": True},
        stop={"strings": ["zyxwvut" * 9] * 8},
        resume=pb.Resume(token_ids=[300] * length, model_fingerprint=model.model_fingerprint),
    )
    return in_threads(target, lambda stub: list(stub.Generate(request)))


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
        form = {"json_schema": json.dumps(schemas[number % len(schemas)])}
        list(stub.Generate(pb.GenerateRequest(text="x", sampling={"structured_output": form, "max_tokens": 1})))

    return in_threads(target, call)


def slow_forms(target: Target) -> int:
    """Send forms that are compiled within the limits, each a new one that takes some of them."""
    numbers = itertools.count(os.getpid() * 100_000)

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        names = [f"k{next(numbers)}_{entry}" for entry in range(300)]
        pattern = {"type": "string", "pattern": "^[a-z]{1,50}$"}
        schema = {"anyOf": [{"type": "object", "properties": {name: pattern}, "required": [name]} for name in names]}
        form = {"json_schema": json.dumps(schema)}
        list(stub.Generate(pb.GenerateRequest(text="x", sampling={"structured_output": form, "max_tokens": 1})))

    return in_threads(target, call)


def embed_flood(target: Target) -> int:
    """Ask for the vectors of 64 inputs of 128 tokens, each a new one."""
    rng = random.Random(os.getpid())

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=[rng.randrange(500) for _ in range(128)])) for _ in range(64)]
        stub.Embed(pb.EmbedRequest(inputs=inputs))

    return in_threads(target, call)


def score_flood(target: Target) -> int:
    """Score 128 continuations of 90 words, with the 20 most likely tokens at each place."""
    rng = random.Random(os.getpid())
    words = ("quick", "brown", "fox", "jumps", "over", "dogs")

    def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        texts = [" ".join(rng.choice(words) for _ in range(90)) for _ in range(128)]
        continuations = [pb.Continuation(text=text) for text in texts]
        stub.Score(pb.ScoreRequest(text="once upon a time", continuations=continuations, top_logprobs=20))

    return in_threads(target, call)


def tool_lists(target: Target) -> int:
    """Send conversations with as many and as large tools as a request may have."""
    fields = {f"field_{number}": {"type": "string", "description": "quick brown " * 5} for number in range(32)}
    schema = json.dumps({"type": "object", "properties": fields})
    chat = _conversation("", 1)
    for number in range(128):
        chat.tools.add(name=f"tool_{number}", description="quick", parameters=schema)
    request = pb.TokenizeRequest(chat=chat)
    return in_threads(target, lambda stub: stub.Tokenize(request))
