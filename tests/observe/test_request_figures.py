"""Each request ends in exactly one figure, however it ends: by counter, by metric with a label and by log line."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from observe.test_metrics import page_with
from security.test_token_file import ALICE, token_file
from structlog.testing import capture_logs
from support.figures import Page, check_page
from support.serving import (
    BOUND_SECONDS,
    EOS,
    HELLO,
    HELLO_IDS,
    Serving,
    error_of,
    read_all,
    serving,
    text_request,
    until,
)
from support.session_driver import Caller, cancel, submit

from lineclear import errors
from lineclear.scheduler import metrics_export
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.grpc_api.request_reader import RequestReader
from lineclear.scheduler.requests.request_manager import shutdown_interrupted
from lineclear.v1 import inference_pb2 as pb

GENERATE = "/lineclear.v1.InferenceService/Generate"
GET_MODEL = "/lineclear.v1.InferenceService/GetModel"
DRAIN = "/lineclear.v1.AdminService/Drain"
Way = Callable[[Serving], Awaitable[Any]]
WAYS: dict[str, tuple[Way, dict[str, int], dict[str, int]]] = {}
"""Ways to end, each with the outcomes of admitted requests and the reasons of rejected ones that it adds."""


def way(*ended: str, rejected: str | tuple[str, ...] = ()) -> Callable[[Way], Way]:
    def register(function: Way) -> Way:
        reasons = (rejected,) if isinstance(rejected, str) else rejected
        WAYS[function.__name__] = (function, Counter(ended), Counter(reasons))
        return function

    return register


async def next_key(s: Serving, call: Callable[[], Any]) -> tuple[Any, str]:
    """Start a call, and return it with the engine's key of its request."""
    number = len(s.engine.submitted) + 1
    return call(), await s.engine.next_request(number)


def engine_fails(error: errors.LineclearError) -> Way:
    async def run(s: Serving) -> None:
        call, key = await next_key(s, s.generate)
        s.engine.start(key)
        s.engine.fail(key, error)
        assert (await error_of(call)).reason == error.reason

    return run


def engine_refuses(error: errors.LineclearError, call: Callable[[Serving], Any] = Serving.generate) -> Way:
    async def run(s: Serving) -> None:
        s.engine.refusal = error
        assert (await error_of(call(s))).reason == error.reason
        s.engine.refusal = None

    return run


def refused(reason: str, call: Callable[[Serving], Any]) -> Way:
    async def run(s: Serving) -> None:
        assert (await error_of(call(s))).reason == reason

    return run


def hang_up(request: pb.GenerateRequest, *, is_running: bool = False) -> Way:
    async def run(s: Serving) -> None:
        call, key = await next_key(s, lambda: s.generate(request))
        if is_running:
            s.engine.start(key)
            s.engine.tokens(key, HELLO_IDS[:1])
            await call.read()
        call.cancel()
        await s.idle()

    return run


def answered(tokens: list[int], request: pb.GenerateRequest) -> Way:
    async def run(s: Serving) -> None:
        s.engine.answer = lambda request: tokens
        await read_to_the_end(s.generate(request))

    return run


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


for failure in (
    *(errors.PoisonRequest("x"), errors.NonFiniteLogits("x"), errors.DeadlineExceeded("x"), errors.ModelChanged("x")),
    errors.ShutdownInterrupted("x"),
):
    WAYS[f"engine_fails_{failure.reason}"] = (engine_fails(failure), {failure.reason.lower(): 1}, {})
for refusal in (
    *(errors.QueueFull("x"), errors.PromptTooLong("x"), errors.KvCapacityExceeded("x"), errors.ModelChanged("x")),
    *(errors.AdapterNotFound("x"), errors.ServerDraining("x"), errors.DeadlineExceeded("x")),
):
    WAYS[f"engine_refuses_{refusal.reason}"] = (engine_refuses(refusal), {}, {refusal.reason.lower(): 1})
FULL = {
    "best_of_refused": lambda s: s.generate(text_request(sampling={"best_of": 3})),
    "beams_refused": lambda s: s.generate(text_request(sampling={"num_beams": 2})),
    "submitted_and_refused": lambda s: s.stub.Submit(pb.SubmitRequest(request=text_request())),
}
for title, attempt in FULL.items():
    WAYS[title] = (engine_refuses(errors.QueueFull("x"), attempt), {}, {"queue_full": 1})
FAILING_CHAT = pb.GenerateRequest(chat={"messages": [{"role": "fails", "content": "x"}]})
REFUSED = {
    "invalid": ("INVALID_REQUEST", lambda s: s.generate(text_request(sampling={"top_p": 7.0}))),
    "unknown_model": ("MODEL_NOT_FOUND", lambda s: s.generate(text_request(model="other"))),
    "malformed": ("MALFORMED_MESSAGE", lambda s: s.channel.unary_stream(GENERATE)(b"\xff")),
    "too_long": ("PROMPT_TOO_LONG", lambda s: s.generate(text_request("a b " * 200))),
    "template_fails": ("INVALID_REQUEST", lambda s: s.generate(FAILING_CHAT)),
    "invalid_submit": ("INVALID_REQUEST", lambda s: s.stub.Submit(pb.SubmitRequest())),
    "invalid_tokenize": ("INVALID_REQUEST", lambda s: s.stub.Tokenize(pb.TokenizeRequest())),
    "other_token": ("TOKEN_OUT_OF_VOCABULARY", lambda s: s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**6]))),
    "malformed_unary": ("MALFORMED_MESSAGE", lambda s: s.channel.unary_unary(GET_MODEL)(b"\xff")),
    "admin_method": ("UNSUPPORTED", lambda s: s.channel.unary_unary(DRAIN)(b"")),
    "other_result": ("UNKNOWN_REQUEST", lambda s: s.stub.GetResult(pb.GetResultRequest(request_id="nobody"))),
    "invalid_embed": ("INVALID_REQUEST", lambda s: s.stub.Embed(pb.EmbedRequest())),
    "other_call": ("UNKNOWN_REQUEST", lambda s: s.stub.Attach(pb.AttachRequest(request_id="nobody"))),
}
for title, (reason, attempt) in REFUSED.items():
    WAYS[title] = (refused(reason, attempt), {}, {reason.lower(): 1})
for title, hanging_up in {
    "hang_up_while_waiting": hang_up(text_request()),
    "hang_up_while_running": hang_up(text_request(), is_running=True),
    "beams_cancelled": hang_up(text_request(sampling={"num_beams": 2})),
}.items():
    WAYS[title] = (hanging_up, {"cancelled": 1}, {})
COMPLETE = text_request(
    resume={"token_ids": HELLO_IDS, "model_fingerprint": HELLO.model_fingerprint},
    sampling={"max_tokens": len(HELLO_IDS), "seed": 1},
)
for title, tokens, request, outcome in (
    ("complete", HELLO_IDS, text_request(), "length"),
    ("end_of_sequence", [*HELLO_IDS, EOS], text_request(), "stop_eos"),
    ("several_outputs", HELLO_IDS, text_request(sampling={"n": 3}), "length"),
    ("best_of", HELLO_IDS, text_request(sampling={"best_of": 3}), "length"),
    ("stop_string", HELLO_IDS, text_request(stop={"strings": ["ell"]}), "stop_string"),
    ("complete_when_resumed", [], COMPLETE, "length"),
):
    WAYS[title] = (answered(tokens, request), {outcome: 1}, {})


def move_to_the_end(s: Serving, left: float, seconds: float = 100.0) -> None:
    """Let the only live request have `left` of its `seconds`."""
    (live,) = s.manager.requests
    live.deadline = live.services.clock() + left
    live.call = live.call._replace(arrival=live.deadline - seconds)


def cancel_by_name(left: float) -> Way:
    async def run(s: Serving) -> None:
        call, _ = await next_key(s, lambda: s.generate(text_request(request_id="a-name")))
        move_to_the_end(s, left)
        assert (await s.stub.Cancel(pb.CancelRequest(request_id="a-name"))).found
        assert (await error_of(call)).reason == "CANCELLED"

    return run


WAYS["cancel_by_name"] = (cancel_by_name(99.0), {"cancelled": 1}, {})
WAYS["cancel_by_name_before_the_deadline"] = (cancel_by_name(0.9), {"cancelled": 1}, {})


def hang_up_near_the_end(left: float, seconds: float) -> Way:
    async def run(s: Serving) -> None:
        call, _ = await next_key(s, s.generate)
        move_to_the_end(s, left, seconds)
        call.cancel()
        await s.idle()

    return run


ROUNDED, LATE = hang_up_near_the_end(0.9, 100.0), hang_up_near_the_end(0.2, 0.5)
WAYS["hang_up_at_the_deadline"] = (ROUNDED, {"deadline_exceeded": 1}, {})  # of a timeout that gRPC has rounded up
WAYS["hang_up_of_a_late_call"] = (LATE, {"deadline_exceeded": 1}, {})  # which was 0.2 s on its way
WAYS["hang_up_before_the_deadline"] = (hang_up_near_the_end(9.0, 10.0), {"cancelled": 1}, {})


@way("shutdown_interrupted")
async def shutdown(s: Serving) -> None:
    call, key = await next_key(s, s.generate)
    s.engine.start(key)
    await call.read()
    s.manager.fail_all(shutdown_interrupted)
    assert (await error_of(call)).reason == "SHUTDOWN_INTERRUPTED"


@way("slow_consumer")
async def slow_consumer(s: Serving) -> None:
    call, key = await next_key(s, s.generate)
    await until(lambda: len(s.manager.requests) == 1)
    s.engine.start(key)
    s.engine.tokens(key, HELLO_IDS[:1] * 20_000)
    assert (await error_of(call)).reason == "SLOW_CONSUMER"


@way("length")
async def one_output_cancelled(s: Serving) -> None:
    call, keys = await two_outputs(s)
    s.engine.tokens(keys[1], HELLO_IDS)
    s.engine.finish_by(keys[1], FinishReason.LENGTH)
    await until(lambda: next(iter(s.manager.requests)).outputs[1].has_ended)
    assert (await s.stub.Cancel(pb.CancelRequest(request_id="two", index=0))).found
    await read_to_the_end(call)


@way("cancelled")
async def all_outputs_cancelled(s: Serving) -> None:
    call, _ = await two_outputs(s)
    for index in (0, 1):
        assert (await s.stub.Cancel(pb.CancelRequest(request_id="two", index=index))).found
    await read_to_the_end(call)


async def two_outputs(s: Serving) -> tuple[Any, list[str]]:
    """Start a request named two; return its call and the engine's keys of its outputs."""
    call = s.generate(text_request(request_id="two", sampling={"n": 2}))
    await s.engine.next_request(2)
    keys = [request.request_id for request in s.engine.submitted]
    for key in keys:
        s.engine.start(key)
    return call, keys


@way("length", rejected="duplicate_request")
async def duplicate(s: Serving) -> None:
    call, key = await next_key(s, lambda: s.generate(text_request(request_id="one")))
    assert (await error_of(s.generate(text_request(request_id="one")))).reason == "DUPLICATE_REQUEST"
    s.engine.start(key)
    s.engine.tokens(key, HELLO_IDS[:1])
    s.engine.finish_by(key, FinishReason.LENGTH)
    await read_all(call)


@way("cancelled", "cancelled", rejected="queue_full")
async def quota_full(s: Serving) -> None:
    await beyond_the_quota(s, s.generate)


@way(rejected="cancelled")
async def hang_up_while_tokenizing(s: Serving) -> None:
    async with held_tokenizer(s):
        call = s.generate()
        await until(lambda: len(s.manager.requests) == 1)
        call.cancel()
        await s.idle()


@way(rejected="deadline_exceeded")
async def deadline_while_tokenizing(s: Serving) -> None:
    async with held_tokenizer(s):
        await error_of(s.generate(timeout=0.2))
        await s.idle()


def paced(reason: str, seconds: float | None = None, *, is_read: bool = True) -> Way:
    """End a call before its request is admitted, or before it is read: at its deadline, or by a hang-up."""

    async def run(s: Serving) -> None:
        is_waiting = asyncio.Event()

        async def wait(*_: Any, **options: Any) -> None:
            is_waiting.set()
            await asyncio.Event().wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(s.service.pacer if is_read else RequestReader, "wait" if is_read else "first", wait)
            call = s.generate(text_request("a " * 50_000), timeout=seconds)
            await is_waiting.wait()
            if seconds is None:
                call.cancel()
            await until(lambda: s.service.stats.rejected[reason])

    return run


WAYS["hang_up_before_the_message"] = (paced("cancelled", is_read=False), {}, {"cancelled": 1})
WAYS["deadline_before_the_message"] = (paced("deadline_exceeded", 0.5, is_read=False), {}, {"deadline_exceeded": 1})
WAYS["hang_up_while_paced"] = (paced("cancelled"), {}, {"cancelled": 1})
WAYS["deadline_while_paced"] = (paced("deadline_exceeded", 0.2), {}, {"deadline_exceeded": 1})


@contextlib.asynccontextmanager
async def held_tokenizer(s: Serving) -> Any:
    """Hold the tokenization of prompts inside the block."""

    async def ids(*_: Any) -> list[int]:
        await asyncio.Event().wait()
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s.service.tokenizers, "ids", ids)
        yield


@way("length", "cancelled", rejected=("invalid_request", "prompt_too_long"))
async def session(s: Serving) -> None:
    caller = Caller(s)
    await caller.send(submit(1))
    key = await s.engine.next_request(len(s.engine.submitted) + (not s.manager.requests))
    s.engine.start(key)
    s.engine.tokens(key, HELLO_IDS[:1])
    s.engine.finish_by(key, FinishReason.LENGTH)
    await caller.until(lambda: 1 in caller.finished)
    await caller.send(submit(2, text_request(sampling={"top_p": 7.0})), submit(3, text_request("a b " * 200)))
    await caller.until(lambda: len(caller.failed) == 2)
    await caller.send(submit(4))
    await until(lambda: len(s.manager.requests) == 1)
    await s.engine.next_request(len(s.engine.submitted) or 1)
    await until(lambda: any(r.queue_place.was_admitted for r in s.manager.requests))
    await caller.send(cancel(4))
    await caller.until(lambda: 4 in caller.failed)
    await caller.call.done_writing()
    while await caller.read():
        pass


@way("cancelled", rejected="invalid_request")
async def session_ends_with_a_repeated_handle(s: Serving) -> None:
    caller = Caller(s)
    await caller.send(submit(1), submit(1))
    assert (await error_of(caller.call)).reason == "INVALID_REQUEST"
    await s.idle()


@way("cancelled", "cancelled")
async def session_ends_with_its_call(s: Serving) -> None:
    caller = Caller(s)
    await caller.send(submit(1), submit(2))
    await until(lambda: [r.queue_place.was_admitted for r in s.manager.requests] == [True, True])
    caller.call.cancel()
    await s.idle()


@way("length")
async def submitted(s: Serving) -> None:
    s.engine.answer = lambda request: HELLO_IDS
    await s.stub.Submit(pb.SubmitRequest(request=text_request()))
    await s.idle()


@way("cancelled")
async def submitted_and_cancelled(s: Serving) -> None:
    reply = await s.stub.Submit(pb.SubmitRequest(request=text_request()))
    assert (await s.stub.Cancel(pb.CancelRequest(request_id=reply.request_id))).found
    await s.idle()


@way("poison_request")
async def attached_to_a_failed_answer(s: Serving) -> None:
    request = pb.SubmitRequest(request=text_request())
    reply, key = await next_key(s, lambda: asyncio.ensure_future(awaited(s.stub.Submit(request))))
    request_id = (await reply).request_id
    s.engine.start(key)
    s.engine.fail(key, errors.PoisonRequest("x"))
    call = s.stub.Attach(pb.AttachRequest(request_id=request_id))
    assert (await error_of(call)).reason == "POISON_REQUEST"


@way("no_output", "no_output")
async def score(s: Serving) -> None:
    number = len(s.engine.submitted)
    request = pb.ScoreRequest(token_ids={"ids": [5]}, continuations=[{"token_ids": {"ids": [6]}}] * 2)
    call = asyncio.ensure_future(awaited(s.stub.Score(request)))
    await s.engine.next_request(number + 2)
    for each in s.engine.submitted[number:]:
        s.engine.start(each.request_id)
        s.engine.finish_by(each.request_id, FinishReason.NO_OUTPUT)
    await call


@way("cancelled", "cancelled", rejected="queue_full")
async def embed_beyond_the_quota(s: Serving) -> None:
    """The first two inputs have places; the third has none, and ends the call before any is in the queue."""
    request = pb.EmbedRequest(inputs=[{"token_ids": {"ids": [5]}}] * 3)
    await beyond_the_quota(s, lambda: s.stub.Embed(request))


async def beyond_the_quota(s: Serving, ask: Callable[[], Any]) -> None:
    """Two requests wait, as many as may; `ask` is refused."""
    waiting = [(await next_key(s, s.generate))[0] for _ in range(2)]
    assert (await error_of(ask())).reason == "QUEUE_FULL"
    for call in waiting:
        call.cancel()
    await s.idle()


@way()
async def hang_up_of_another_call(s: Serving) -> None:
    call = s.stub.Session()
    await call.initial_metadata()
    call.cancel()
    await until(lambda: not s.manager.sessions)


async def awaited(call: Any) -> Any:
    return await call


async def page_of(s: Serving) -> Page:
    return check_page(Page(page_with(await metrics_export.current(s.manager, s.server.certificates))), idle=True)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'fails' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("name", WAYS)
async def test_each_end_is_in_one_figure(tmp_path: Path, name: str) -> None:
    function, ended, rejected = WAYS[name]
    async with serving(tmp_path, template=TEMPLATE, max_queue_size=2) as s:
        with capture_logs() as lines:
            async with asyncio.timeout(BOUND_SECONDS):
                await function(s)
            await until(lambda: len(s.manager.requests) == 0)
        page = await page_of(s)
        assert (page.ended, page.rejected) == (Counter(ended), Counter(rejected))
        logged = Counter(line["outcome"] for line in lines if line["event"] == "request_ended")
        assert page.ended <= logged <= page.ended + page.rejected
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        assert stats.counters.requests_rejected == sum(rejected.values())
        assert stats.counters.requests_admitted == sum(ended.values())


async def test_a_call_without_a_token_is_counted_once(tmp_path: Path) -> None:
    file = token_file(tmp_path, f"alice {ALICE}")
    async with serving(tmp_path, token_file=str(file)) as s:
        await error_of(s.generate())
        assert (await page_of(s)).rejected == Counter(unauthenticated=1)
