"""Conversations are rendered in processes that can be killed, and callers share them fairly."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs
from support.answers import invalid_fields, of_tenant
from support.processes import Process, is_running
from support.processes import until as until_true
from support.serving import BOUND_SECONDS, TEMPLATE, TOKENIZER, Serving, error_of, serving, text_request, until
from support.small_tokenizers import byte_level, save

from lineclear.scheduler.requests import limited_processes
from lineclear.scheduler.requests.limited_processes import LimitedProcesses, num_processes
from lineclear.scheduler.requests.loop_pacer import LoopPacer
from lineclear.scheduler.requests.validate.request import check_detokenize
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.template_renderer import ChatMessage, ChatTemplate, Conversation
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
SLOW = "777"  # characters that are in no special token, so a template compares no others
SOMETIMES = "{% if messages[0].content == '" + SLOW + "' %}" + LOOP + "{% endif %}" + TEMPLATE


def chat(*contents: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def tokenize(s: Serving, *contents: str, **options: Any) -> Any:
    return s.stub.Tokenize(pb.TokenizeRequest(chat=chat(*contents)), **options)


def pool_of(s: Serving) -> LimitedProcesses:
    pool = s.service.tokenizers.processes
    assert pool is not None
    return pool


async def test_looping_template_is_killed_and_blocks_no_request(tmp_path: Path) -> None:
    async with serving(tmp_path, template=SOMETIMES, max_chat_template_seconds=0.3) as s:
        with capture_logs() as logs:
            looping = tokenize(s, SLOW, "secret", **of_tenant("a"))
            s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
            assert [r async for r in s.generate(text_request())]
            assert (await tokenize(s, "quick", **of_tenant("b"))).token_ids
            assert not looping.done()
            error = await error_of(looping)
        assert (error.code, [v.field for v in error.violations]) == ("INVALID_ARGUMENT", ["chat.messages"])
        assert "0.3 s" in str(error)
        ended = [line for line in logs if line["event"] == "limited_process_ended"]
        assert [line["exit_code"] for line in ended] == [-signal.SIGPROF]
        assert "secret" not in str(logs)
        await until(lambda: pool_of(s).turns.num_inside == 0)
        # The next conversation is rendered as before.
        assert (await tokenize(s, "quick", **of_tenant("a"))).token_ids


async def test_modules_in_the_working_directory_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be started in any folder, even with a json.py in it."""
    for name in ("json", "jinja2", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)

    async with serving(tmp_path) as s:
        assert (await tokenize(s, "quick", timeout=BOUND_SECONDS)).token_ids


async def test_process_renders_the_same_tokens(s: Serving) -> None:
    contents = ["plain", "<|im_end|> is no special token", "日本語 😀\r\n\x00", "", "x" * 5000]
    messages = [ChatMessage("user", content) for content in contents]
    text = ChatTemplate(TEMPLATE, TOKENIZER.seal, {}).render(Conversation(messages))
    assert list((await tokenize(s, *contents)).token_ids) == TOKENIZER.encode_sealed(text)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses this conversation: Roles must alternate"),
        ("{{ messages[7].content + 1 }}", "fails on this conversation"),
        ("{{ (messages[0].content * 999999999) | length }}", "fails on this conversation"),
        ("{{ messages[0].content * 900000 }}", "makes more than"),
    ],
)
async def test_rejected_conversation_is_an_invalid_request(tmp_path: Path, template: str, sentence: str) -> None:
    async with serving(tmp_path, template=template) as s:
        error = await error_of(tokenize(s, "secret"))
        assert (error.code, [v.field for v in error.violations]) == ("INVALID_ARGUMENT", ["chat.messages"])
        assert sentence in str(error)
        assert "secret" not in str(error)


async def test_process_has_a_memory_limit_and_low_priority(s: Serving) -> None:
    """Its standard error goes to no log."""
    assert (await tokenize(s, "quick")).token_ids
    pool = pool_of(s)
    (pid,) = pool.pids
    assert 0 < resource.prlimit(pid, resource.RLIMIT_AS)[0] <= 1 << 30
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    assert os.readlink(f"/proc/{pid}/fd/2") == os.devnull


async def test_killed_process_is_replaced(tmp_path: Path) -> None:
    """Between two conversations callers see no error; during one, its caller gets a retryable error."""
    async with serving(tmp_path, template=SOMETIMES) as s:
        assert (await tokenize(s, "quick")).token_ids
        pool = pool_of(s)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_running(pid))
        assert (await tokenize(s, "quick")).token_ids
        looping = tokenize(s, SLOW)
        await until(lambda: pool.pids and not pool.num_idle)
        os.kill(pool.pids[0], signal.SIGKILL)
        error = await error_of(looping)
        assert (error.code, error.retry_after_seconds) == ("RESOURCE_EXHAUSTED", 1.0)
        assert (await tokenize(s, "quick")).token_ids


async def test_answer_of_a_process_without_cpu_time_is_retryable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a process may get no CPU time, so its limit of CPU time never ends it."""
    monkeypatch.setattr(limited_processes, "_LEAST_WAIT_SECONDS", 1.0)
    async with serving(tmp_path, max_chat_template_seconds=0.2) as s:
        assert (await tokenize(s, "quick")).token_ids
        pool = pool_of(s)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        error = await error_of(tokenize(s, "quick"))
        assert (error.code, error.retry_after_seconds) == ("RESOURCE_EXHAUSTED", 2.0)
        assert "more than 2 s, because the machine is busy" in str(error)
        await until(lambda: not is_running(pid))
        assert (await tokenize(s, "quick")).token_ids


@pytest.mark.parametrize(("cores", "processes"), [(1, 2), (2, 2), (12, 3), (64, 8)])
def test_number_of_processes_follows_the_cores(cores: int, processes: int) -> None:
    assert num_processes(cores) == processes


async def test_failed_process_start_is_retryable(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **options: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        error = await error_of(tokenize(s, "quick"))
    assert (error.code, error.retry_after_seconds) == ("RESOURCE_EXHAUSTED", 1.0)
    assert (await tokenize(s, "quick")).token_ids


async def test_cancelled_conversations_keep_their_process(tmp_path: Path) -> None:
    """Otherwise a caller that cancels repeatedly would make the server start processes all the time."""
    some_milliseconds = "{% for a in range(99999) %}{% endfor %}" * 8 + TEMPLATE
    async with serving(tmp_path, template=some_milliseconds) as s:
        assert (await tokenize(s, "quick")).token_ids
        pool = pool_of(s)
        pids = pool.pids
        for _ in range(5):
            call = tokenize(s, "quick")
            await until(lambda: not pool.num_idle)
            call.cancel()
            await until(lambda: pool.num_idle)
        assert (await tokenize(s, "quick")).token_ids
        assert pool.pids == pids


async def test_conversation_messages_are_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, max_chat_messages=3) as s:
        assert (await tokenize(s, *"abc")).token_ids
        for call in (tokenize(s, *"abcd"), s.generate(pb.GenerateRequest(chat=chat(*"abcd")))):
            error = await error_of(call)
            assert [(v.field, v.description) for v in error.violations] == [
                ("chat.messages", "has 4 entries, the limit is 3")
            ]


def detokenize(s: Serving, **options: Any) -> Any:
    return s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 20_000), **options)


def long_text(s: Serving, **options: Any) -> Any:
    return s.stub.Tokenize(pb.TokenizeRequest(text="a b " * 50_000), **options)


def many_messages(s: Serving, **options: Any) -> Any:
    return tokenize(s, *["content"] * 800, **options)


@pytest.mark.parametrize("work", [detokenize, long_text, many_messages])
async def test_flood_of_one_tenant_does_not_delay_another(s: Serving, work: Callable[..., Any]) -> None:
    prompts = s.service.tokenizers
    await asyncio.gather(tokenize(s, "x", **of_tenant("x")), tokenize(s, "y", **of_tenant("y")))  # start processes
    flood = [work(s, **of_tenant("a")) for _ in range(60)]
    await until(lambda: prompts.turns.num_waiting + pool_of(s).turns.num_waiting >= 8)
    await work(s, **of_tenant("b"))
    assert sum(not call.done() for call in flood) >= 4
    for call in flood:
        call.cancel()


async def test_hundred_small_conversations_are_accepted(s: Serving) -> None:
    assert await asyncio.gather(*(outcome(tokenize(s, "hello")) for _ in range(100))) == ["OK"] * 100


async def test_full_queue_admits_another_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineclear.scheduler.requests.tokenizer_pool._MAX_BUSY", 10)
    async with serving(tmp_path) as s:
        flood = [asyncio.ensure_future(outcome(detokenize(s, **of_tenant("a")))) for _ in range(30)]
        await until(lambda: s.service.tokenizers.turns.num_waiting == 8)
        assert await outcome(detokenize(s, **of_tenant("b"))) == "OK"
        found = [await call for call in flood]
        assert found.count("RESOURCE_EXHAUSTED") >= 10
        assert found.count("OK") >= 8


async def outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_loop_runs_while_tokens_are_decoded(s: Serving) -> None:
    call = detokenize(s)
    iterations = 0
    while not call.done():
        await asyncio.sleep(0)
        iterations += 1
    assert iterations > 50
    assert (await call).text == decode(TOKENIZER, [5] * 20_000, keep_special=False)


async def test_long_texts_are_tokenized_at_low_priority(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def encode(text: str) -> list[int]:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return TOKENIZER.encode(text)

    pool = s.service.tokenizers
    monkeypatch.setattr(pool, "tokenizer", SimpleNamespace(encode=encode))
    assert await pool.encode("x" * 2000) == TOKENIZER.encode("x" * 2000)
    assert await pool.encode("x") == TOKENIZER.encode("x")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [max(own, 5), own], "a short one is tokenized by the event loop"


class _Sliced(list[int]):
    """Tokens of which only a few may be read at a time."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.largest = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.largest = max(self.largest, len(found) if isinstance(found, list) else 1)
        return found

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all of them are read at once")


async def test_tokens_are_validated_and_decoded_in_slices(s: Serving) -> None:
    """All at once, 65,000 tokens would delay every stream by 5 ms."""
    ids = _Sliced([5] * 20_000)
    check_detokenize(SimpleNamespace(token_ids=ids), 20_000)  # type: ignore[arg-type]
    text = await s.service.tokenizers.decode(ids, keep_special=False, vocab_size=6)
    assert 0 < ids.largest <= 1024
    assert text == decode(TOKENIZER, [5] * 20_000, keep_special=False)
    wrong = pb.DetokenizeRequest(token_ids=[*[5] * 15_000, 70_000, *[5] * 5_000])
    assert await invalid_fields(s.stub.Detokenize(wrong)) == ["token_ids[15000]"]


async def test_tokens_of_a_long_text_are_sent_in_slices(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, 260,000 tokens would delay every stream by 5 ms."""
    ids = _Sliced(range(50_000))

    async def encode(text: str) -> _Sliced:
        return ids

    monkeypatch.setattr(s.service.tokenizers, "encode", encode)
    response = await s.stub.Tokenize(pb.TokenizeRequest(text="a"))
    assert list(response.token_ids) == list(range(50_000))
    assert 0 < ids.largest <= 16_384


async def test_deadline_passes_while_a_prompt_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineclear.scheduler.requests.limited_processes.num_processes", lambda cores: 1)
    async with serving(tmp_path, template=SOMETIMES, default_deadline_seconds=0.5) as s:
        slow = tokenize(s, SLOW)
        await until(lambda: pool_of(s).turns.num_inside == 1)
        session = s.stub.Session()
        submit = pb.SubmitCommand(handle=1, request=pb.GenerateRequest(chat=chat("quick")))
        await session.write(pb.SessionRequest(submits=[submit]))
        assert from_status((await session.read()).events[0].error).reason == "DEADLINE_EXCEEDED"
        slow.cancel()
        session.cancel()
        await s.idle()


def test_no_template_process_outlives_its_scheduler(tmp_path: Path) -> None:
    model, sockets = save(tmp_path, byte_level(), TEMPLATE), tmp_path / "d"
    sockets.mkdir(mode=0o700)
    flags = ["--model", str(model), "--listen", f"unix:{tmp_path}/s", "--log-format", "json"]
    with Process([*flags, "--socket-directory", str(sockets)]) as process:
        process.wait_for("listening")
        until_true(lambda: template_processes(process.popen.pid))
        children = template_processes(process.popen.pid)
        process.popen.kill()
        until_true(lambda: not any(map(is_running, children)))


def template_processes(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for path in found for pid in path.read_text().split()]
    return [pid for pid in pids if b"template_renderer" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_large_conversation_is_converted_in_pieces(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop serves streams between the check and the parts of the conversion."""
    large = [0]
    wait = LoopPacer.wait

    async def counted(self: LoopPacer) -> None:
        large[0] += 1
        await wait(self)

    monkeypatch.setattr(LoopPacer, "wait", counted)
    await tokenize(s, "quick")
    assert large[0] == 0
    await tokenize(s, *[""] * 1024)
    assert large[0] == 4
