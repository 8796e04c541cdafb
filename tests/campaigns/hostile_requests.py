"""Hostile callers whose requests are many, large, or expensive in each step."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from campaigns.hostile_target import METHODS, NUM_THREADS, Target, counted, in_threads

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def cancel_storm(target: Target) -> int:
    """Cancel requests right after sending them, by Generate and over a Session."""
    return asyncio.run(_cancel_storm(target))


async def _cancel_storm(target: Target) -> int:
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


def oversized_requests(target: Target) -> int:
    """Send requests above the size limit, in a Session and by Generate."""
    request = pb.GenerateRequest(text="x" * 5_000_000)
    command = pb.SessionRequest(submits=[pb.SubmitCommand(handle=1, request=request)])

    def call(stub: Any) -> None:
        with counted():
            list(stub.Generate(request))
        list(stub.Session(iter([command])))

    return in_threads(target, call)


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
    command = pb.SessionRequest(submits=[pb.SubmitCommand(handle=handle, request=request) for handle in range(32)])

    def call(stub: Any) -> None:
        with counted():
            list(stub.Generate(request))
        list(stub.Session(iter([command])))

    return in_threads(target, call)


def beam_searches(target: Target) -> int:
    """Search with as many beams and end ids as the server accepts, up to the end."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[9, 10]),
        sampling={"num_beams": 32, "max_tokens": 400, "min_tokens": 399, "early_stopping": 3},
        stop={"token_ids": range(100, 116), "eos_token_ids": range(200, 216)},
    )
    return in_threads(target, lambda stub: list(stub.Generate(request)), num_threads=1)


def ambiguous_grammars(target: Target) -> int:
    """Ask for answers of a grammar whose work grows with each token."""
    form = {"grammar": 'start: "x" a\na: a a | a a a | a a a a | /[a-z ]/'}
    request = pb.GenerateRequest(text="x", sampling={"structured_output": form, "max_tokens": 200})
    return in_threads(target, lambda stub: list(stub.Generate(request)))


def lexer_heavy_forms(target: Target) -> int:
    """Ask for answers of a regular expression of which each mask is near the bound of its work."""
    parts = "|".join(f"[a-z ]*{chr(97 + i)}[a-z ]{{{5 + i}}}{chr(97 + i)}" for i in range(12))
    request = pb.GenerateRequest(
        text="x", sampling={"structured_output": {"regex": f"({parts}).*"}, "max_tokens": 200, "temperature": 1}
    )
    return in_threads(target, lambda stub: list(stub.Generate(request)))


def repetition_penalties(target: Target) -> int:
    """Ask for DRY over the longest prompt of one token, with as many breakers as the server accepts."""
    with target.channel() as channel:
        model = inference_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[300] * min(7000, model.context_length - 64)),
        sampling={
            "max_tokens": 60,
            "ignore_eos": True,
            "dry_multiplier": 1.0,
            "dry_allowed_length": 1,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["quick brown " * 4 + str(number) for number in range(16)],
        },
    )
    return in_threads(target, lambda stub: list(stub.Generate(request)))


def stop_regexes(target: Target) -> int:
    """Ask for many outputs that end at the most expensive stop regex."""
    request = pb.GenerateRequest(
        text="quick brown", sampling={"max_tokens": 200, "n": 24, "ignore_eos": True}, stop={"regex": "[^z]{8,16}z{9}"}
    )
    return in_threads(target, lambda stub: list(stub.Generate(request)), num_threads=1)


def unread_answers(target: Target) -> int:
    """Submit requests with all log probabilities and never read the answers."""
    output = pb.OutputOptions(logprobs=True, top_logprobs=20)
    sampling = {"max_tokens": 64, "ignore_eos": True}
    request = pb.SubmitRequest(
        request=pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), output=output, sampling=sampling)
    )
    return in_threads(target, lambda stub: stub.Submit(request))
