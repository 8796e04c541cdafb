"""FakeTransport: the example in its docstring is run, and it behaves as a server would for both clients."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import threading
from typing import Any

import pytest

from lineclear.client import AsyncClient, Client, FinishReason, HealthStatus
from lineclear.client import testing as module
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, QueueFull
from lineclear.v1 import inference_pb2 as pb


@pytest.fixture(params=["sync", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Any:
    async def generated(client: AsyncClient, prompt: Any, **params: Any) -> Any:
        return await client.generate(prompt, **params)

    def generate(fake: FakeTransport, prompt: Any, *, max_attempts: int = 3, **params: Any) -> Any:
        if request.param == "sync":
            return Client(transport=fake, max_attempts=max_attempts).generate(prompt, **params)
        return asyncio.run(generated(AsyncClient(transport=fake, max_attempts=max_attempts), prompt, **params))

    return generate


def test_the_documented_example_works() -> None:
    assert module.__doc__ is not None
    lines = module.__doc__.splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    client, fake = namespace["client"], namespace["fake"]
    assert client.generate("Flaky").text == "second time lucky"
    assert len(fake.requests) == 3


def test_script_by_prompt(ask: Any) -> None:
    fake = FakeTransport({"hi": "hello you"})
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    for prompt in ("hi", [104, 105], turns):
        result = ask(fake, prompt)
        assert (result.text, result.finish_reason) == ("hello you", FinishReason.STOP_EOS)
        assert bytes(result.token_ids) == b"hello you"
    with pytest.raises(InvalidRequest, match="no reply to this prompt"):
        ask(fake, "something else")


def test_each_output_has_the_reply(ask: Any) -> None:
    assert [output.text for output in ask(FakeTransport("one two"), "x", n=3).outputs] == ["one two"] * 3


def test_script_as_function_or_single_reply(ask: Any) -> None:
    assert ask(FakeTransport(lambda request: request.text.upper()), "abc").text == "ABC"
    fake = FakeTransport(["first", "then"])
    assert [ask(fake, "x").text for _ in range(3)] == ["first", "then", "then"]


def test_errors_before_and_during_an_answer(ask: Any) -> None:
    fake = FakeTransport([QueueFull("full", retry_after_seconds=0.0), Answer("half of", error=InternalError("broken"))])
    with pytest.raises(InternalError):
        ask(fake, "x")
    assert len(fake.requests) == 2
    with pytest.raises(QueueFull):
        ask(FakeTransport(QueueFull("full", retry_after_seconds=0.0)), "x", max_attempts=1)


def test_requests_are_recorded(ask: Any) -> None:
    fake = FakeTransport("ok")
    ask(fake, "x", max_tokens=5, metadata={"Tenant": "a"}, timeout_seconds=9)
    assert fake.cancelled == 0
    (call,) = fake.requests
    assert call.message == pb.GenerateRequest(text="x", sampling={"max_tokens": 5})
    assert call.metadata == (("tenant", "a"),)
    assert call.timeout_seconds is not None
    assert 8 < call.timeout_seconds <= 9


def test_a_deadline_passes_in_a_delay(ask: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        ask(FakeTransport(Answer("slow", delay_seconds=3600.0)), "x", timeout_seconds=0.02)


def test_options_shape_the_answer(ask: Any) -> None:
    answer = Answer(pieces=("ab", "c"), finish_reason=FinishReason.STOP_STRING, matched_stop="!", delay_seconds=0.001)
    result = ask(FakeTransport(answer), "x", top_logprobs=2, logprob_token_ids=[9], token_timings=True, omit_text=True)
    assert (result.text, result.token_ids, result.matched_stop) == ("", (97, 98, 99), "!")
    assert [len(entry.top_logprobs) for entry in result.logprobs] == [2, 2, 2]
    assert [[x.token_id for x in entry.token_id_logprobs] for entry in result.logprobs] == [[9]] * 3
    assert len(result.token_times_seconds) == 3


def test_cancelling_wakes_a_delay_and_is_counted_once() -> None:
    fake = FakeTransport(Answer("slow", delay_seconds=3600.0))
    with Client(transport=fake) as client, client.stream("x") as stream:
        next(stream)
        threading.Timer(0.02, stream.cancel).start()
        with pytest.raises(Cancelled):
            next(stream)
    assert (fake.cancelled, fake.closed) == (1, True)


async def test_cancelling_wakes_an_async_delay() -> None:
    fake = FakeTransport(Answer("slow", delay_seconds=3600.0))
    async with AsyncClient(transport=fake) as client, client.stream("x") as stream:
        await anext(stream)
        asyncio.get_running_loop().call_later(0.02, stream.cancel)
        with pytest.raises(Cancelled):
            await anext(stream)
    assert fake.cancelled == 1


def test_unary_calls() -> None:
    fake = FakeTransport()
    fake.model.model_id = "mine"
    fake.health = HealthStatus.NOT_SERVING
    with Client(transport=fake) as client:
        assert client.detokenize(client.tokenize("hé")) == "hé"
        assert (client.model().model_id, client.stats().server_version) == ("mine", "fake")
        assert client.health() is HealthStatus.NOT_SERVING
        assert [call.path.rpartition("/")[2] for call in fake.calls] == [
            "Tokenize", "Detokenize", "GetModel", "GetStats", "Check",
        ]  # fmt: skip
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("x")


async def test_aclosing_a_batch_cancels_the_rest() -> None:
    fake = FakeTransport(lambda request: "now" if request.text == "0" else Answer("much later", delay_seconds=3600.0))
    async with AsyncClient(transport=fake) as client:
        before = asyncio.all_tasks()
        each = client.iter_batch(map(str, range(10**9)), concurrency=4, window=6)
        async with contextlib.aclosing(each) as outcomes:
            assert (await anext(outcomes)).text == "now"  # type: ignore[union-attr]
        assert asyncio.all_tasks() == before
