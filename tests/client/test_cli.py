"""The lineclear command, run in this process by typer's runner and as a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from support.patience import PATIENCE_SECONDS
from typer.testing import CliRunner, Result

from lineclear import errors
from lineclear.client import Sampling
from lineclear.client.cli import chat, exits, screen, serve
from lineclear.client.cli.app import app
from lineclear.client.cli.flags import SamplingFlags
from lineclear.errors import LineclearError, tree
from lineclear.status import CODE_NUMBERS
from lineclear.v1 import inference_pb2 as pb

COMMAND = [sys.executable, "-m", "lineclear.client.cli"]
QUICK = ["--max-attempts", "1"]


@pytest.fixture
def cli(server: Any) -> Any:
    def invoke(*arguments: str, input: str | None = None) -> Result:
        environment = {"LINECLEAR_TARGET": server.target, "COLUMNS": "120", "NO_COLOR": "1"}
        result = CliRunner().invoke(app, list(arguments), input=input, env=environment, prog_name="lineclear")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def process(server: Any, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LINECLEAR_TARGET": server.target, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, env=environment, **settings,
    )  # fmt: skip


def spawn(*arguments: str, stdin: int | None = None, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """The command, listening to SIGINT also where the tests were started in the background and ignore it."""
    environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a handler is not inherited, SIG_IGN is
    try:
        return subprocess.Popen(
            [*COMMAND, *arguments], stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, env=environment
        )
    finally:
        signal.signal(signal.SIGINT, before)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


# -- generate


def test_an_answer_is_shown(cli: Any) -> None:
    result = cli("generate", "one two")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two\n", "")


def test_a_prompt_comes_from_standard_input_too(cli: Any, server: Any) -> None:
    assert cli("generate", input="one two\n").stdout == "one two\n"
    assert cli("generate", "-", input="three\n\n").stdout == "three\n"
    assert [request.text for request in server.requests] == ["one two", "three\n"]


def test_every_field_of_sampling_is_a_flag() -> None:
    flags = [field.name for field in dataclasses.fields(SamplingFlags)]
    assert sorted(flags) == sorted(field.name for field in dataclasses.fields(Sampling))


def test_flags_arrive_in_the_request(cli: Any, server: Any) -> None:
    result = cli(
        "generate", "x", "-n", "9", "--temperature", "0", "--top-k", "4", "--top-p", "0.5", "--min-p", "0.25",
        "--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.5",
        "--logit-bias", "5=1.5", "--logit-bias", "6=-2", "--allowed-token-ids", "1,2", "--banned-token-ids", "3",
        "--seed", "7", "--min-tokens", "1", "--ignore-eos", "--stop", "a", "--stop", "b", "--stop-token-ids", "8, 9",
        "--include-stop-string", "--priority", "0", "--top-logprobs", "2", "--token-timings", "--header", "a=b=c",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert server.requests == [
        pb.GenerateRequest(
            text="x",
            sampling={
                "temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5,
                "presence_penalty": -0.5, "frequency_penalty": 0.5,
                "logit_bias": [{"token_id": 5, "bias": 1.5}, {"token_id": 6, "bias": -2}],
                "allowed_token_ids": [1, 2], "banned_token_ids": [3], "seed": 7, "min_tokens": 1, "max_tokens": 9,
                "ignore_eos": True,
            },
            stop={"strings": ["a", "b"], "token_ids": [8, 9], "include_stop_string": True},
            priority=0,
            output={"logprobs": True, "top_logprobs": 2, "token_timings": True},
        )
    ]  # fmt: skip
    assert server.metadata[0]["a"] == "b=c"


def test_no_flag_leaves_the_servers_defaults(cli: Any, server: Any) -> None:
    cli("generate", "x")
    assert server.requests == [pb.GenerateRequest(text="x")]


def test_a_conversation_and_token_ids_are_prompts(cli: Any, server: Any) -> None:
    cli("generate", "x", "--system", "be kind")
    cli("generate", "x", "--chat")
    cli("generate", "--token-ids", "1,2")
    assert [[turn.role for turn in request.chat.messages] for request in server.requests] == [
        ["system", "user"], ["user"], [],
    ]  # fmt: skip
    assert list(server.requests[2].token_ids.ids) == [1, 2]


def test_json_is_one_object_and_deltas_come_before_it(cli: Any) -> None:
    (result,) = lines(cli("generate", "one two", "--json").stdout)
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("one two", [100, 101], "length")
    *pieces, last = lines(cli("generate", "one two", "--json", "--deltas").stdout)
    assert "".join(piece["delta"]["text"] for piece in pieces) == last["result"]["text"] == "one two"


def test_several_prompts_are_a_line_each_in_order(cli: Any) -> None:
    result = cli("generate", "a", "b c", "d")
    assert [(line["index"], line["prompt"], line["text"]) for line in lines(result.stdout)] == [
        (0, "a", "a"), (1, "b c", "b c"), (2, "d", "d"),
    ]  # fmt: skip


def test_a_file_of_prompts(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("\n".join(f"prompt {n}" for n in range(50)) + "\n\n", "utf-8")
    result = cli("generate", "--file", str(prompts), "--out", str(out), "-n", "5", "--concurrency", "4")
    assert (result.exit_code, result.stdout) == (0, "")
    assert [line["text"] for line in lines(out.read_text("utf-8"))] == [f"prompt {n}" for n in range(50)]
    assert {request.sampling.max_tokens for request in server.requests} == {5}
    assert server.most_open <= 4


def test_a_file_of_json_with_parameters_of_its_own(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    objects = [
        {"id": "first", "prompt": "é x", "max_tokens": 3, "logit_bias": {"5": 1.0}},
        {"messages": [{"role": "user", "content": "hi"}], "priority": 1},
        {"prompt": [1, 2]},
    ]
    prompts.write_text("\n".join(map(json.dumps, objects)), "utf-8")
    found = lines(cli("generate", "--file", str(prompts), "-n", "7", "--concurrency", "1").stdout)
    assert [(line.get("id"), line["text"]) for line in found] == [("first", "é x"), (None, "hi"), (None, "")]
    first, second, third = server.requests
    assert (first.sampling.max_tokens, first.sampling.logit_bias[0].token_id) == (3, 5)
    assert (second.chat.messages[0].content, second.priority, second.sampling.max_tokens) == ("hi", 1, 7)
    assert list(third.token_ids.ids) == [1, 2]


def test_json_is_recognised_by_its_first_line_where_there_is_no_name(cli: Any, server: Any) -> None:
    cli("generate", "--file", "-", input='{"prompt": "a"}\n')
    cli("generate", "--file", "-", input="{not json\n")
    cli("generate", "--file", "-", "--format", "text", input='{"prompt": "a"}\n')
    assert [request.text for request in server.requests] == ["a", "{not json", '{"prompt": "a"}']


def test_a_line_of_json_that_is_no_request_is_not_taken_for_a_prompt(cli: Any, server: Any) -> None:
    result = cli("generate", "--file", "-", input='{"text": "one", "max_tokens": 3}\n')
    assert result.exit_code == 2
    assert "`prompt` or `messages`" in " ".join(result.output.split())
    assert server.requests == []
    assert cli("generate", "--file", "-", "--format", "text", input='{"text": "one"}\n').exit_code == 0
    assert [request.text for request in server.requests] == ['{"text": "one"}']


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2"),
        ("[]", "`prompt` or `messages`"),
        ('{"prompt": "a", "temprature": 1}', "temprature"),
        ('{"prompt": "a", "top_k": -1}', "sampling.top_k"),
        ('{"prompt": 5}', "prompt must be"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2"),
    ],
)
def test_a_wrong_line_is_found_before_anything_is_asked(
    cli: Any, server: Any, tmp_path: Path, line: str, sentence: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n' + line + "\n", "utf-8")
    result = cli("generate", "--file", str(prompts))
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", "")
    assert server.requests == []


def test_a_prompt_that_fails_is_reported_in_its_line(cli: Any, server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "bad":
            server.fail(context, errors.PromptTooLong("too long"))
        yield server.finished(0)

    server.script = script
    result = cli("generate", "good", "bad", "good", *QUICK)
    assert result.exit_code == exits.SOME_FAILED
    assert [line.get("error", {}).get("reason") for line in lines(result.stdout)] == [None, "PROMPT_TOO_LONG", None]


def test_a_server_that_leaves_ends_the_run_and_resume_goes_on(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("a\nb\nc\nd\n", "utf-8")
    alive = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "c":
            server.fail(context, errors.Drained("gone"))
        yield from alive(request, context)

    server.script = script
    arguments = ("generate", "--file", str(prompts), "--out", str(out), "--concurrency", "1", *QUICK)
    assert cli(*arguments).exit_code == 64 + 14
    assert [line["text"] for line in lines(out.read_text("utf-8"))] == ["a", "b"]
    with out.open("a") as file:
        file.write('{"index": 2, "prom')  # as a full disk or a lost machine leaves it
    server.script = alive
    server.requests.clear()
    assert cli(*arguments, "--resume").exit_code == 0
    assert [(line["index"], line["text"]) for line in lines(out.read_text("utf-8"))] == list(enumerate("abcd"))
    assert [request.text for request in server.requests] == ["c", "d"]


# -- exit codes


@pytest.mark.parametrize("kind", [kind for kind in tree() if kind not in (LineclearError, errors.Foreign)])
def test_every_error_has_its_exit_code_and_a_sentence(cli: Any, server: Any, kind: type[LineclearError]) -> None:
    server.failures = [kind("what happened")]
    result = cli("generate", "x", "--json", *QUICK)
    assert result.exit_code == 64 + CODE_NUMBERS[kind.code]
    assert "what happened" in result.stderr
    assert lines(result.stdout)[0]["error"]["reason"] == kind.reason


def test_the_version_is_told(cli: Any) -> None:
    result = cli("--version")
    assert result.exit_code == 0
    assert result.output == f"lineclear {version('lineclear')}\n"


def test_help_lists_every_exit_code(cli: Any) -> None:
    text = " ".join(cli("--help").output.split())
    for code, number in CODE_NUMBERS.items():
        if code != "OK":
            assert f"{64 + number} {code}" in text


@pytest.mark.parametrize(
    "command", ["generate", "submit", "attach", "result", "chat", "health", "stats", "model", "tokenize"]
)
def test_every_command_has_help_without_a_server(cli: Any, command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0
    assert "--target" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate", "x", "--temperature", "hot"],
        ["generate", "x", "--token-ids", "1"],
        ["generate", "--token-ids", "a"],
        ["generate", "x", "--logit-bias", "5"],
        ["generate", "x", "--target", "https://x"],
        ["generate", "x", "--header", "novalue"],
        ["generate", "x", "--header", "grpc-x=1"],
        ["generate", "--file", "/nonexistent/file"],
        ["generate", "x", "--resume"],
        ["generate", "x", "--out", "/nonexistent/file"],
        ["tokenize", "a b", "--decode"],
    ],
)
def test_wrong_usage_is_two_and_never_a_traceback(cli: Any, server: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert server.requests == []


def test_nobody_there_says_what_to_try(tmp_path: Path, cli: Any) -> None:
    result = cli("generate", "x", "--target", f"unix:{tmp_path}/nobody", *QUICK)
    assert result.exit_code == 64 + 14
    assert "lineclear serve" in result.stderr


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("Tls handshake failed: OPENSSL_internal:WRONG_VERSION_NUMBER", "without TLS"),
        ("Tls handshake failed: OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed", "--tls-ca"),
        ("Failed to create security handshaker.", "--tls-ca"),
        ("Socket closed", "--tls"),
        ("Connection refused", "lineclear serve"),
    ],
)
def test_a_door_that_is_misunderstood_has_a_hint_of_its_own(said: str, hint: str) -> None:
    assert hint in (exits.hint(errors.Unreachable(f"no answer from x:1: {said}")) or "")


# -- the other commands


def test_an_answer_is_left_and_fetched(cli: Any, server: Any) -> None:
    name = cli("submit", "one two three", "-n", "7").stdout.strip()
    assert server.submitted[name].sampling.max_tokens == 7
    assert cli("attach", name).stdout == "one two three\n"
    assert json.loads(cli("attach", name, "--from-index", "1", "--json").stdout)["text"] == " two three"
    assert cli("result", name).stdout == "one two three\n"
    assert json.loads(cli("result", name, "--json").stdout)["usage"]["completion_tokens"] == 3
    now = json.loads(cli("result", name, "--no-wait", "--json").stdout)
    assert (now["state"], now["text"], now["token_ids"]) == ("running", "one two three", [100, 101, 102])
    assert cli("result", name, "--cancel").exit_code == 0
    assert cli("result", name, "--cancel").exit_code == 1
    assert cli("result", name).exit_code not in (0, 1, 2)


def test_health(cli: Any, server: Any) -> None:
    assert (cli("health").exit_code, cli("health").stdout) == (0, "serving\n")
    server.health_answers = [b"\x08\x02"]
    result = cli("health", "--json", "--service", "")
    assert (result.exit_code, lines(result.stdout)) == (1, [{"status": "not_serving", "service": ""}])


def test_health_can_wait(cli: Any, server: Any) -> None:
    server.health_answers = [b"\x08\x02", grpc.StatusCode.UNAVAILABLE, b"\x08\x01"]
    asked = cli("health", "--wait", "20", *QUICK)
    assert (asked.exit_code, asked.stdout) == (0, "serving\n")


def test_stats_as_a_table_as_json_and_again_and_again(cli: Any) -> None:
    table = cli("stats").stdout
    for figure in ("9.9", "draining", "17", "250.00"):
        assert figure in table
    found = lines(cli("stats", "--json", "--watch", "--count", "3", "--interval", "0.05").stdout)
    assert [line["totals"]["requests_finished"] for line in found] == [17, 17, 17]
    assert "between tokens" in cli("stats", "--watch", "--count", "2", "--interval", "0.05").stdout


def test_model(cli: Any) -> None:
    assert "tiny" in cli("model").stdout
    assert lines(cli("model", "--json").stdout)[0]["limits"]["num_blocks"] == 99


def test_tokenize_and_back(cli: Any) -> None:
    assert cli("tokenize", "hi").stdout == "104,105\n"
    assert cli("tokenize", input="hi\n").stdout == "104,105\n"
    assert cli("tokenize", "hi", "--count").stdout == "2\n"
    assert lines(cli("tokenize", "hi", "--json").stdout) == [{"token_ids": [104, 105], "count": 2}]
    assert cli("tokenize", "--decode", "104, 105").stdout == "hi\n"


def test_serve_becomes_the_scheduler_with_every_flag(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(serve, "missing", list)
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append([path, *arguments]))
    cli("serve", "--model", "DIR", "--listen=[::]:1", "--demo", "--help", "--", "--device", "cpu")
    module = ["-m", "lineclear.scheduler.main", "--spawn-worker"]
    rest = ["--model", "DIR", "--listen=[::]:1", "--demo", "--help", "--", "--device", "cpu"]
    assert became == [[sys.executable, sys.executable, "-P", *module, *rest]]


def test_serve_without_its_packages_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.setattr(serve, "_installed", lambda name: name not in ("pyzmq", "torch"))
    result = cli("serve", "--demo")
    assert result.exit_code == 2
    assert "pyzmq, torch is not installed" in result.stderr
    assert "pip install 'lineclear[all]'" in result.stderr


# -- chat


def test_a_conversation_is_sent_whole(cli: Any, server: Any) -> None:
    result = cli("chat", "--system", "be kind", "-n", "4", input="hello\n\nhow are you\n")
    assert (result.exit_code, result.stdout) == (0, "hello\nhow are you\n")
    turns = [[(turn.role, turn.content) for turn in request.chat.messages] for request in server.requests]
    assert turns[0] == [("system", "be kind"), ("user", "hello")]
    assert turns[1] == [*turns[0], ("assistant", "hello"), ("user", "how are you")]
    assert server.requests[1].sampling.max_tokens == 4


def test_an_error_ends_a_conversation_that_nobody_watches(cli: Any, server: Any) -> None:
    server.failures = [errors.NoChatTemplate("this model has no chat template")]
    result = cli("chat", *QUICK, input="hello\nagain\n")
    assert result.exit_code == 64 + 9
    assert len(server.requests) == 1


@pytest.fixture
def talk(server: Any) -> Iterator[chat.Conversation]:
    from lineclear.client import Client

    with Client(server.target, max_attempts=1) as client:
        yield chat.Conversation(client, Sampling(), None)


def test_the_commands_of_a_conversation(
    talk: chat.Conversation, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = chat.Commands(talk)
    talk.say("one")
    talk.say("two")
    commands.run("/undo")
    assert [turn.content for turn in talk.turns] == ["one", "one"]
    commands.run("/system be kind")
    commands.run("/set temperature 0.5")
    commands.run('/set stop ["a", "b"]')
    commands.run("/retry")
    assert (server.requests[-1].chat.messages[0].content, len(talk.turns)) == ("be kind", 2)
    assert (server.requests[-1].sampling.temperature, list(server.requests[-1].stop.strings)) == (0.5, ["a", "b"])
    commands.run("/set temperature")
    assert talk.sampling.temperature is None
    commands.run(f"/save {tmp_path}/talk.json")
    assert [turn["role"] for turn in json.loads((tmp_path / "talk.json").read_text())] == [
        "system",
        "user",
        "assistant",
    ]
    commands.run("/save /nonexistent/place")
    commands.run("/reset")
    assert talk.turns == []
    capsys.readouterr()
    for name in ("/nonsense", "/set nonsense 1", "/undo", "/retry", "/help"):
        commands.run(name)
    assert "there is no command /nonsense" in (text := capsys.readouterr().err)
    assert "/retry" in text
    commands.run("/quit")
    assert commands.left


def test_a_message_that_fails_leaves_no_trace(talk: chat.Conversation, server: Any) -> None:
    talk.say("one")
    kept = list(talk.turns)
    server.failures = [errors.QueueFull("full")] * 2
    with pytest.raises(errors.QueueFull):
        talk.say("two")
    with pytest.raises(errors.QueueFull):
        chat.Commands(talk).run("/retry")
    assert talk.turns == kept


def test_a_wrong_parameter_is_an_error_of_the_next_message_not_of_the_program(talk: chat.Conversation) -> None:
    chat.Commands(talk).run("/set top_k many")
    with pytest.raises(errors.InvalidRequest, match=r"sampling\.top_k"):
        talk.say("one")


def test_a_conversation_on_a_terminal(server: Any, tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("asked before\n")
    history.chmod(0o644)
    told, ours = pty.openpty()
    run = spawn("chat", "--target", server.target, "--history", str(history), *QUICK, stdin=ours, stdout=ours)
    os.close(ours)
    os.write(told, b'hello there\n"""\nline one\nline two\n"""\n/params\n/exit\n')
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    out = os.read(told, 1 << 16)
    os.close(told)
    assert run.returncode == 0, err
    assert out.count(b"hello there") >= 2  # typed and answered
    assert server.requests[1].chat.messages[-1].content == "line one\nline two"
    assert b"all as the server has them" in err
    assert "hello there" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_interrupting_an_answer_on_a_terminal_goes_on_with_the_conversation(server: Any) -> None:
    alive = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.tokens(0, 1, text="begun")
        server.wait_for_end(context)

    server.script = script
    told, ours = pty.openpty()
    run = spawn("chat", "--target", server.target, stdin=ours, stdout=ours)
    os.close(ours)
    os.write(told, b"first\n")
    seen = b""
    while b"begun" not in seen:
        seen += os.read(told, 1 << 16)
    run.send_signal(signal.SIGINT)
    assert server.ended.wait(PATIENCE_SECONDS)
    server.script = alive
    os.write(told, b"second one\n/exit\n")
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    os.close(told)
    assert run.returncode == 0, err
    assert b"stopped; the message is not kept" in err
    assert [turn.content for turn in server.requests[1].chat.messages] == ["second one"]


# -- as a process


def test_as_a_process_it_streams_answers_and_gives_exit_codes(server: Any, tmp_path: Path) -> None:
    done = process(server, "generate", "--json", input="one two")
    assert (done.returncode, lines(done.stdout)[0]["text"], done.stderr) == (0, "one two", "")
    server.failures = [errors.InvalidRequest("no", violations=[errors.Violation("sampling.top_p", "is above 1")])]
    done = process(server, "generate", "x", *QUICK)
    assert (done.returncode, done.stdout) == (64 + 3, "")
    assert "sampling.top_p: is above 1" in done.stderr
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n", "utf-8")
    done = process(server, "generate", "--file", str(prompts))
    assert [line["text"] for line in lines(done.stdout)] == ["a", "b"]


def test_text_is_shown_before_the_answer_ends(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.tokens(0, 1, text="begun")
        server.wait_for_end(context)

    server.script = script
    run = spawn("generate", "x", "--target", server.target)
    assert run.stdout is not None
    assert run.stdout.read(5) == b"begun"
    run.send_signal(signal.SIGINT)  # and Ctrl-C now cancels the call
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 130
    assert b"Traceback" not in err
    assert server.ended.wait(PATIENCE_SECONDS)


def test_a_reader_that_leaves_ends_the_call_quietly(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for index in range(1_000_000):
            if not context.is_active():
                return
            yield server.tokens(index, 1, text="many words ")

    server.script = script
    run = spawn("generate", "x", "--target", server.target)
    assert run.stdout is not None
    assert run.stdout.read(4) == b"many"
    run.stdout.close()
    assert run.stderr is not None
    err = run.stderr.read()
    run.stderr.close()
    assert run.wait(PATIENCE_SECONDS) == 1
    assert err == b""
    assert server.ended.wait(PATIENCE_SECONDS)


def test_interrupting_a_file_of_prompts_cancels_them_and_keeps_what_is_done(server: Any, tmp_path: Path) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "a":
            yield server.finished(0)
        else:
            server.wait_for_end(context)

    server.script = script
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\n", "utf-8")
    run = spawn("generate", "--file", str(prompts), "--target", server.target)
    assert run.stdout is not None
    assert json.loads(run.stdout.readline())["prompt"] == "a"
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 130
    assert b"Traceback" not in err


# -- the screen


def test_a_terminal_is_not_steered_by_a_model() -> None:
    assert screen.safe("a\x1b]0;title\x07b\n\tc\x9b2J") == "a\ufffd]0;title\ufffdb\n\tc\ufffd2J"


def test_a_bundle_shows_typer_its_fields() -> None:
    generate = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in generate.params}
    assert {"target", "temperature", "stop", "top_logprobs", "file"} <= names
    assert not names & {"connection", "sampling", "request"}
