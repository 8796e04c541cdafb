"""Many requests at once, by the threads of a Client and the tasks of an AsyncClient, and their progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from client.conftest import finished, started
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS

from lineclear import errors
from lineclear.client import AsyncClient, Client, Generation, Request, Scores
from lineclear.client.testing import FakeTransport
from lineclear.v1 import inference_pb2 as pb


def test_answers_are_in_the_order_of_the_prompts(server: Any, client: Any) -> None:
    prompts = [f"{n} x" for n in range(40)]
    seen: list[tuple[int, int | None]] = []
    results = client.generate_batch(prompts, concurrency=7, progress=lambda done, total: seen.append((done, total)))
    assert [result.text for result in results] == prompts
    assert seen[-1] == (40, 40)
    assert seen == sorted(seen)
    assert server.most_open <= 7


@pytest.mark.parametrize("chosen", [{"concurrency": 3}, {}], ids=["given", "slots of the server"])
def test_concurrency_requests_run_at_once(server: Any, client: Any, chosen: dict[str, int]) -> None:
    server.max_batch_size = 9 if chosen else 3
    gate = threading.Barrier(3)
    server.play([lambda _: gate.wait(PATIENCE_SECONDS), finished(0)])
    assert len(client.generate_batch(iter("abcdefghi"), **chosen)) == 9
    assert server.most_open == 3


def test_default_concurrency_without_an_answer() -> None:
    """The server has no GetModel, as a fake one might."""

    def no_model(method: Any, *args: Any, **more: Any) -> Any:
        raise errors.Unsupported("no GetModel")

    fake = FakeTransport("ok")
    fake.unary = no_model  # type: ignore[method-assign]
    assert len(Client(transport=fake).generate_batch("abc")) == 3


def test_mapping_gives_a_dict(client: Any) -> None:
    prompts = {"first": "one two", ("second", 2): Request.of("three", max_tokens=3)}
    answers = client.generate_batch(prompts)
    assert {key: answer.text for key, answer in answers.items()} == {"first": "one two", ("second", 2): "three"}
    assert list(answers) == list(prompts)


def test_empty_batch(client: Any) -> None:
    assert (client.generate_batch([]), client.generate_batch(iter(())), client.generate_batch({})) == ([], [], {})


def test_answers_as_completed(server: Any, client: Any) -> None:
    """The first prompt is answered after the answers to the others were read."""
    go_on, seen, indexes = threading.Event(), [], []

    def see(pair: tuple[object, object]) -> None:
        seen.append((pair[0], type(pair[1]).__name__))
        if len(seen) == 3:
            go_on.set()

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        assert request.text != "slow" or go_on.wait(PATIENCE_SECONDS)
        yield finished(0)

    server.script, server.refused = script, {"bad": errors.PromptTooLong("too long")}
    client.each("as_completed", see, {"s": "slow", "a": "x", "b": "bad", "c": "y"})
    assert seen[-1] == ("s", "Generation")
    assert sorted(seen[:3]) == [("a", "Generation"), ("b", "PromptTooLong"), ("c", "Generation")]
    client.each("as_completed", lambda pair: indexes.append(pair[0]), iter("xyz"))
    assert sorted(indexes) == [0, 1, 2]


def test_failure_takes_the_place_of_its_answer(server: Any, client: Any) -> None:
    server.refused = {"bad": errors.PromptTooLong("too long")}
    prompts = {"a": "good", "b": "bad", "c": "\ud800", "d": "good"}
    kinds = ["Generation", "PromptTooLong", "MalformedMessage", "Generation"]
    results = client.generate_batch(prompts.values(), return_exceptions=True)
    assert [type(result).__name__ for result in results] == kinds
    by_key = client.generate_batch(prompts, return_exceptions=True)
    assert {key: type(result).__name__ for key, result in by_key.items()} == dict(zip("abcd", kinds, strict=True))


def test_first_failure_cancels_the_rest(server: Any, client: Any) -> None:
    running = threading.Event()

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "bad":
            assert running.wait(PATIENCE_SECONDS)
            server.fail(context, errors.PromptTooLong("too long"))
        yield started()
        running.set()
        server.wait_for_end(context)

    server.script = script
    with pytest.raises(errors.PromptTooLong):
        client.generate_batch(["endless", "bad", *["never asked"] * 50], concurrency=2)
    assert len(server.requests) <= 3


def test_wrong_argument_is_raised(client: Any) -> None:
    with pytest.raises(TypeError, match="no such parameter"):
        client.generate_batch(["x"], return_exceptions=True, temprature=1)


def test_closing_the_results_cancels_the_rest(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "0":
            yield finished(0)
        else:
            server.wait_for_end(context)

    server.script = script
    with Client(server.target) as client:
        outcomes = client.iter_batch(map(str, range(10**9)), concurrency=4, window=6)
        assert next(outcomes).finish_reason == "length"  # type: ignore[union-attr]
        outcomes.close()
    assert len(server.requests) <= 7


class Slow:
    """Prompts that come from a person: the first at once, the next when `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.is_asked = threading.Event()

    def __iter__(self) -> Iterator[str]:
        yield "one"
        self.is_asked.set()
        assert self.go_on.wait(SOON_SECONDS)
        yield "two"


def test_answer_is_delivered_before_the_next_prompt(client: Any) -> None:
    prompts, texts = Slow(), []

    def see(outcome: Any) -> None:
        texts.append(outcome.text)
        assert prompts.go_on.is_set() == (len(texts) == 2)
        prompts.go_on.set()

    client.each("iter_batch", see, prompts)
    assert texts == ["one", "two"]


def test_batch_ends_while_its_prompts_block(server: Any) -> None:
    """Cancelled from another thread, and by leaving the loop."""
    for is_cancelled in (True, False):
        prompts = Slow()
        with Client(server.target) as client:
            outcomes = client.iter_batch(prompts, concurrency=4)
            next(outcomes)
            assert prompts.is_asked.wait(PATIENCE_SECONDS)
            if is_cancelled:
                threading.Timer(0.05, outcomes.cancel).start()
                with pytest.raises(errors.Cancelled):
                    next(outcomes)
                with pytest.raises(StopIteration):
                    next(outcomes)
            else:
                outcomes.close()
            assert not prompts.go_on.is_set()
            assert client.generate("x y").text == "x y"
        prompts.go_on.set()


async def test_async_batch_ends_while_its_prompts_block(server: Any) -> None:
    prompts = Slow()

    async with AsyncClient(server.target) as client:
        async with contextlib.aclosing(client.iter_batch(prompts, concurrency=4)) as outcomes:
            await anext(outcomes)
            with pytest.raises(TimeoutError):  # the event loop is free
                await asyncio.wait_for(anext(outcomes), 0.05)
        assert (await client.generate("x y")).text == "x y"
    assert not prompts.go_on.is_set()
    prompts.go_on.set()


async def test_asynchronous_prompts_that_wait_or_fail(server: Any) -> None:
    """Their task ends with the batch: after the last prompt, when the reader leaves, and by their own error."""
    ends: list[str] = []

    async def prompts(name: str, seconds: float, error: type[Exception] | None = None) -> AsyncIterator[str]:
        yield "one"
        try:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error(name)
        finally:
            ends.append(name)

    async with AsyncClient(server.target) as client:
        answers = await client.generate_batch(prompts("last", 0))
        assert [answer.text for answer in answers] == ["one"]
        async with contextlib.aclosing(client.iter_batch(prompts("left", 3600))) as outcomes:
            assert (await anext(outcomes)).text == "one"
        with pytest.raises(KeyError, match="failed"):
            await client.generate_batch(prompts("failed", 0, KeyError), return_exceptions=True)
        await asyncio.sleep(0)
        assert ends == ["last", "left", "failed"]
        assert [task.get_name() for task in asyncio.all_tasks() if "_run_in_task" in repr(task)] == []
    with Client(server.target) as threads, pytest.raises(TypeError, match="async_generator"):
        threads.generate_batch(prompts("threads", 0))


@pytest.mark.parametrize("error", [KeyError("a"), SystemExit(3)])
def test_error_of_the_prompts_is_raised(client: Any, error: BaseException) -> None:
    """Whatever it is: a thread that ended with it would leave the others waiting."""

    def prompts() -> Iterator[str]:
        yield "one"
        raise error

    with pytest.raises(type(error)):
        client.generate_batch(prompts(), return_exceptions=True)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_rich", [True, False])
def test_progress_bar_on_a_terminal_needs_rich(monkeypatch: pytest.MonkeyPatch, has_rich: bool) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    advice = pytest.warns(UserWarning, match=r"package rich; run: pip install .*\[cli\]")
    with Client(transport=FakeTransport("ok then")) as client, contextlib.nullcontext() if has_rich else advice:
        assert len(client.generate_batch(["a", "b", "c"], progress=True)) == 3
    assert ("3/3" in screen.getvalue()) is ("━" in screen.getvalue()) is has_rich


def test_progress_bar_is_closed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Client(transport=FakeTransport({"a": "ok"})) as client, pytest.raises(errors.InvalidRequest, match="no reply"):
        client.generate_batch(["a", "b"], progress=True)
    assert screen.getvalue().endswith(("\n", "\x1b[?25h"))  # the cursor is shown again


def test_no_terminal_no_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Client(transport=FakeTransport("ok")) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        for progress in (True, False, None):
            client.generate_batch(["a", "b"], progress=progress)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_async", [False, True])
async def test_endless_prompts_are_read_no_further_than_the_window(is_async: bool) -> None:
    """The answers wait for their reader, and the prompts for the answers. One task runs an asynchronous generator."""
    taken: list[int] = []

    async def asynchronous(task: asyncio.Task[object] | None = None) -> AsyncIterator[str]:
        for prompt in synchronous:
            assert asyncio.current_task() is (task := task or asyncio.current_task())
            await asyncio.sleep(0)
            yield prompt

    synchronous = (taken.append(n) or str(n) for n in itertools.count())  # type: ignore[func-returns-value]
    prompts = asynchronous() if is_async else synchronous
    async with AsyncClient(transport=FakeTransport("ok")) as client:
        async with contextlib.aclosing(client.iter_batch(prompts, concurrency=4, window=8)) as answers:
            for count in range(1, 31):
                assert isinstance(await anext(answers), Generation)
                assert len(taken) <= count + 8
        assert len(taken) <= 38


ITEMS = [(f"prompt {n}", ["x" * (1 + n % 5), "y"]) for n in range(40)]
Call = Callable[..., Any]


class Gate(FakeTransport):
    """Refuses a prompt named "bad", and counts the calls that run at once: each ends when `together` of them run."""

    def __init__(self, together: int = 1) -> None:
        super().__init__("unused")
        self.most, self._running, self._together = 0, 0, together
        self._changed = threading.Condition()

    def unary(self, method: Any, request: Any, **options: Any) -> Any:
        if getattr(request, "text", "") == "bad":
            raise errors.PromptTooLong("too long")
        return super().unary(method, request, **options)

    def _unary_answer(self, path: str, request: Any) -> Any:
        with self._changed:
            self._running += 1
            self.most = max(self.most, self._running)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self._together, PATIENCE_SECONDS)
            self._running -= 1
        return super()._unary_answer(path, request)


def in_threads(transport: FakeTransport, *arguments: Any, **params: Any) -> Any:
    with Client(transport=transport, max_attempts=1) as client:
        return client.score_batch(*arguments, **params)


def in_tasks(transport: FakeTransport, *arguments: Any, **params: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(transport=transport, max_attempts=1) as client:
            return await client.score_batch(*arguments, **params)

    return asyncio.run(run())


both = pytest.mark.parametrize("run", [in_threads, in_tasks])


@both
def test_scores_are_in_the_order_of_the_prompts(run: Call) -> None:
    seen: list[tuple[int, int | None]] = []
    transport = Gate()
    found = run(
        transport, iter(ITEMS), concurrency=7, top_logprobs=1, progress=lambda done, total: seen.append((done, total))
    )
    assert [len(scores.scores[0].token_ids) for scores in found] == [1 + n % 5 for n in range(40)]
    assert {call.message.text for call in transport.calls if getattr(call.message, "top_logprobs", 0) == 1} == {
        p for p, _ in ITEMS
    }
    assert seen[-1][0] == 40


def test_concurrency_calls_run_at_once() -> None:
    transport = Gate(together=3)
    assert len(in_threads(transport, ITEMS, concurrency=3)) == 40
    assert transport.most == 3


@both
def test_failure_takes_the_place_of_its_scores(run: Call) -> None:
    items = [ITEMS[0], ("bad", ["x"]), ("good", "text"), ITEMS[1]]
    kinds = [type(found) for found in run(Gate(), items, return_exceptions=True)]
    assert kinds == [Scores, errors.PromptTooLong, errors.InvalidRequest, Scores]
    with pytest.raises(errors.PromptTooLong):
        run(Gate(), items, concurrency=1)


@both
def test_wrong_arguments_are_raised(run: Call) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        run(Gate(), ITEMS, concurrency=0)
    with pytest.raises(TypeError, match="score\\(\\) has no parameter temperature"):
        run(Gate(), ITEMS, temperature=1.0)
    assert run(Gate(), []) == []


async def test_cancelling_the_task_ends_its_calls() -> None:
    ended: list[str] = []

    class Silent(FakeTransport):
        async def unary_async(self, method: Any, request: Any, **options: Any) -> Any:
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            finally:
                ended.append(request.text)

    async with AsyncClient(transport=Silent("unused")) as client:
        task = asyncio.create_task(client.score_batch(ITEMS, concurrency=4))
        while not ended:
            await asyncio.sleep(0.01)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert sorted(ended) == [f"prompt {n}" for n in range(4)]
