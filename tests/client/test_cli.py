"""The lineclear command, run in this process by typer's runner: generate, the other commands, and exit codes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.command import QUICK, lines
from google.rpc.code_pb2 import Code

from lineclear import errors
from lineclear.cli import exit_status, output
from lineclear.cli.options import RequestFlags, SamplingFlags
from lineclear.client import Sampling, local_server
from lineclear.client.requests import REQUEST_FIELDS, Request
from lineclear.errors import LineclearError, tree
from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command
from lineclear.v1 import inference_pb2 as pb

# -- generate


def test_generate_shows_the_answer(cli: Any) -> None:
    result = cli("generate", "one two")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two\n", "")


def test_prompt_from_standard_input(cli: Any, server: Any) -> None:
    assert cli("generate", input="one two\n").stdout == "one two\n"
    assert cli("generate", "-", input="three\n\n").stdout == "three\n"
    assert [request.text for request in server.requests] == ["one two", "three\n"]


def test_every_sampling_field_is_an_option() -> None:
    flags = [option.name for option in SamplingFlags.options]
    assert sorted(flags) == sorted(field.name for field in dataclasses.fields(Sampling))


def test_every_request_field_is_an_option() -> None:
    flags = {option.name for option in RequestFlags.options}
    no_flags = {"metadata", "on_queued", "response_format", "tools", "tool_choice"}
    no_flags.add("parallel_tool_calls")
    of_connection = {"on_model_change", "timeout_seconds"}
    assert flags == REQUEST_FIELDS - no_flags - of_connection - {"add_generation_prompt", "queue_position"}


OPTIONS: dict[str, tuple[str | list[str], Any]] = {
    "max_tokens": ("9", 9), "temperature": ("0", 0), "top_k": ("4", 4), "top_p": ("0.5", 0.5), "min_p": ("0.25", 0.25),
    "repetition_penalty": ("1.5", 1.5), "presence_penalty": ("-0.5", -0.5), "frequency_penalty": ("0.5", 0.5),
    "logit_bias": (["5=1.5", "6=-2"], {5: 1.5, 6: -2}), "allowed_token_ids": ("1,2", [1, 2]),
    "banned_token_ids": ("3", [3]), "bad_words": (["x y", "z"], ["x y", "z"]),
    "begin_banned_token_ids": ("4,5", [4, 5]), "forced_first_token_id": ("0", 0),
    "no_repeat_ngram_size": ("3", 3), "exponential_decay_start": ("2", 2),
    "exponential_decay_factor": ("1.5", 1.5), "typical_p": ("0.5", 0.5), "top_n_sigma": ("1.5", 1.5),
    "xtc_probability": ("0.5", 0.5), "xtc_threshold": ("0.25", 0.25), "dynatemp_range": ("0.5", 0.5),
    "dynatemp_exponent": ("2", 2), "dry_multiplier": ("0.5", 0.5), "dry_base": ("2", 2), "dry_allowed_length": ("3", 3),
    "dry_penalty_last_n": ("-1", -1), "dry_sequence_breakers": ("a b", ["a b"]), "seed": ("7", 7),
    "min_tokens": ("1", 1),
    "repetition_detection": ("20,4", {"max_pattern_size": 20, "min_count": 4, "min_pattern_size": 1}),
    "truncate_prompt_tokens": ("50", 50), "ignore_eos": ([], True), "stop": (["a", "b"], ["a", "b"]),
    "stop_token_ids": ("8, 9", [8, 9]), "stop_regex": ("c+", "c+"), "eos_token_ids": ("3", [3]),
    "include_stop_string": ([], True), "priority": ("0", 0), "expected_tokens": ("4", 4), "top_logprobs": ("2", 2),
    "logprob_token_ids": ("7,5", [7, 5]), "prompt_logprobs": ("0", 0), "token_timings": ([], True), "echo": ([], True),
    "num_speculative_tokens": ("0", 0), "cache_salt": ("s", "s"), "request_id": ("r", "r"), "model": ("m", "m"),
    "model_fingerprint": ("f", "f"),
}  # fmt: skip
"""What is given for the flag of a parameter, and the value of the parameter."""


def test_options_are_in_the_request(cli: Any, server: Any) -> None:
    arguments: list[str] = []
    for name, (given, _) in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        for text in [given] if isinstance(given, str) else given:
            arguments += [flag, text]
        arguments += [] if given else [flag]
    result = cli("generate", "--json", "x", *arguments, "--header", "a=b=c", "--tenant", "t")
    assert result.exit_code == 0, result.output
    values: Any = {name: value for name, (_, value) in OPTIONS.items()}
    assert server.requests == [Request.of("x", **values).to_proto()]
    assert server.metadata[0]["a"] == "b=c"
    assert server.metadata[0]["x-tenant-id"] == "t"


def test_short_options(cli: Any, server: Any) -> None:
    cli("generate", "x", "-n", "9", "-T", "0.5", "-s", "a")
    assert server.requests == [Request.of("x", max_tokens=9, temperature=0.5, stop=["a"]).to_proto()]


def test_without_options_fields_are_unset(cli: Any, server: Any) -> None:
    cli("generate", "x")
    assert server.requests == [pb.GenerateRequest(text="x")]


def test_chat_and_token_id_prompts(cli: Any, server: Any) -> None:
    cli("generate", "x", "--system", "be kind")
    cli("generate", "x", "--chat")
    cli("generate", "--token-ids", "1,2")
    assert [[turn.role for turn in request.chat.messages] for request in server.requests] == [
        ["system", "user"], ["user"], [],
    ]  # fmt: skip
    assert list(server.requests[2].token_ids.ids) == [1, 2]


def test_json_output_with_deltas(cli: Any) -> None:
    (result,) = lines(cli("generate", "one two", "--json").stdout)
    assert (result["text"], result["token_ids"], result["finish_reason"]) == ("one two", [100, 101], "length")
    *pieces, last = lines(cli("generate", "one two", "--json", "--deltas").stdout)
    assert "".join(piece["delta"]["text"] for piece in pieces) == last["result"]["text"] == "one two"


def test_numbers_that_json_lacks_are_null() -> None:
    """A banned token has the log-probability minus infinity."""
    line = output.json_line({"logprobs": [(5, -math.inf), {"x": math.nan}], "y": 1.5})
    assert json.loads(line, parse_constant=pytest.fail) == {"logprobs": [[5, None], {"x": None}], "y": 1.5}


def test_several_prompts_are_lines_in_order(cli: Any) -> None:
    result = cli("generate", "a", "b c", "d")
    assert [(line["index"], line["prompt"], line["text"]) for line in lines(result.stdout)] == [
        (0, "a", "a"), (1, "b c", "b c"), (2, "d", "d"),
    ]  # fmt: skip


def test_prompt_file_of_text(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("\n".join(f"prompt {n}" for n in range(50)) + "\n\n", "utf-8")
    result = cli("generate", "--file", str(prompts), "--out", str(out), "-n", "5", "--concurrency", "4")
    assert (result.exit_code, result.stdout) == (0, "")
    assert [line["text"] for line in lines(out.read_text("utf-8"))] == [f"prompt {n}" for n in range(50)]
    assert {request.sampling.max_tokens for request in server.requests} == {5}
    assert server.most_open <= 4


def test_prompt_file_of_json_with_parameters(cli: Any, server: Any, tmp_path: Path) -> None:
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


def test_json_is_recognised_by_its_first_line(cli: Any, server: Any) -> None:
    cli("generate", "--file", "-", input='{"prompt": "a"}\n')
    cli("generate", "--file", "-", input="{not json\n")
    cli("generate", "--file", "-", "--format", "text", input='{"prompt": "a"}\n')
    assert [request.text for request in server.requests] == ["a", "{not json", '{"prompt": "a"}']


def test_json_line_without_prompt_is_an_error(cli: Any, server: Any) -> None:
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
        ('{"prompt": 5}', "prompt: must be"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2"),
    ],
)
def test_invalid_line_is_reported_before_any_request(
    cli: Any, server: Any, tmp_path: Path, line: str, sentence: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n' + line + "\n", "utf-8")
    result = cli("generate", "--file", str(prompts))
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", "")
    assert server.requests == []


def test_failed_prompt_has_an_error_in_its_line(cli: Any, server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "bad":
            server.fail(context, errors.PromptTooLong("too long"))
        yield server.finished(0)

    server.script = script
    result = cli("generate", "good", "bad", "good", *QUICK)
    assert result.exit_code == ExitCode.NEGATIVE
    assert [line.get("error", {}).get("reason") for line in lines(result.stdout)] == [None, "PROMPT_TOO_LONG", None]


def test_resume_continues_after_an_unavailable_server(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("a\nb\nc\nd\n", "utf-8")
    alive = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "c":
            server.fail(context, errors.ShutdownInterrupted("gone"))
        yield from alive(request, context)

    server.script = script
    arguments = ("generate", "--file", str(prompts), "--out", str(out), "--concurrency", "1", *QUICK)
    assert cli(*arguments).exit_code == 114
    assert [line["text"] for line in lines(out.read_text("utf-8"))] == ["a", "b"]
    with out.open("a") as file:
        file.write('{"index": 2, "prom')  # an incomplete line, as after a full disk
    server.script = alive
    server.requests.clear()
    assert cli(*arguments, "--resume").exit_code == 0
    assert [(line["index"], line["text"]) for line in lines(out.read_text("utf-8"))] == list(enumerate("abcd"))
    asked = [request.text for request in server.requests]  # the cancelled "d" of the first run may arrive late
    assert set(asked) == {"c", "d"}
    assert asked.count("c") == 1


# -- exit codes


@pytest.mark.parametrize("kind", [kind for kind in tree() if kind not in (LineclearError, errors.UnknownStatus)])
def test_every_error_has_exit_code_and_message(cli: Any, server: Any, kind: type[LineclearError]) -> None:
    server.failures = [kind("what happened")]
    result = cli("generate", "x", "--json", *QUICK)
    assert result.exit_code == 100 + Code.Value(kind.code)
    assert "what happened" in result.stderr
    assert lines(result.stdout)[0]["error"]["reason"] == kind.reason


def test_version(cli: Any) -> None:
    result = cli("--version")
    assert result.exit_code == 0
    assert result.output == f"lineclear {version('lineclear')}\n"


def test_help_lists_every_exit_code(cli: Any) -> None:
    text = " ".join(cli("--help").output.split())
    for code, number in Code.items():
        if code != "OK":
            assert f"{100 + number} {code}" in text


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
        ["generate", "x", "--out", "/nonexistent/file"],
        ["tokenize", "a b", "--decode"],
    ],
)
def test_wrong_usage_exits_with_2(cli: Any, server: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert server.requests == []


def test_os_error_is_a_message(cli: Any) -> None:
    result = cli("generate", "--file", "/nonexistent/file")
    assert result.stderr == "error: /nonexistent/file: No such file or directory\n"


def test_unreachable_server_has_a_hint(tmp_path: Path, cli: Any) -> None:
    result = cli("generate", "x", "--target", f"unix:{tmp_path}/nobody", *QUICK)
    assert result.exit_code == 114
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
def test_tls_mismatch_has_a_hint(said: str, hint: str) -> None:
    assert hint in (exit_status.hint(errors.Unreachable(f"no answer from x:1: {said}")) or "")


# -- the other commands


def test_submit_and_result(cli: Any, server: Any) -> None:
    name = cli("submit", "one two three", "-n", "7").stdout.strip()
    assert server.submitted[name].sampling.max_tokens == 7
    assert cli("attach", name).stdout == "one two three\n"
    assert json.loads(cli("attach", name, "--from-index", "1", "--json").stdout)["text"] == " two three"
    assert cli("result", name).stdout == "one two three\n"
    assert json.loads(cli("result", name, "--json").stdout)["usage"]["completion_tokens"] == 3
    now = json.loads(cli("result", name, "--no-wait", "--json").stdout)
    assert (now["state"], now["text"], now["token_ids"]) == ("running", "one two three", [100, 101, 102])
    assert cli("cancel", name).exit_code == 0
    again = cli("cancel", name, "--json")
    assert (again.exit_code, json.loads(again.stdout)) == (1, {"request_id": name, "found": False})
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


def test_stats_as_table_json_and_watch(cli: Any) -> None:
    table = cli("stats").stdout
    for figure in ("9.9", "draining", "17", "250.00"):
        assert figure in table
    found = lines(cli("stats", "--json", "--watch", "--count", "3", "--interval", "0.05").stdout)
    assert [line["counters"]["requests_finished"] for line in found] == [17, 17, 17]
    assert "between tokens" in cli("stats", "--watch", "--count", "2", "--interval", "0.05").stdout


def test_model(cli: Any) -> None:
    assert "tiny" in cli("model").stdout
    assert lines(cli("model", "--json").stdout)[0]["limits"]["num_blocks"] == 99


def test_tokenize_and_decode(cli: Any) -> None:
    assert cli("tokenize", "hi").stdout == "104,105\n"
    assert cli("tokenize", input="hi\n").stdout == "104,105\n"
    assert cli("tokenize", "hi", "--count").stdout == "2\n"
    assert lines(cli("tokenize", "hi", "--json").stdout) == [{"token_ids": [104, 105], "count": 2}]
    assert cli("tokenize", "--decode", "104, 105").stdout == "hi\n"


def test_serve_passes_every_flag_to_the_scheduler(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(local_server, "missing", list)
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append([path, *arguments]))
    cli("serve", "--model", "DIR", "--listen=[::]:1", "--demo", "--help", "--", "--device", "cpu")
    module = ["-m", "lineclear.scheduler.main", "--spawn-worker"]
    rest = ["--model", "DIR", "--listen=[::]:1", "--demo", "--help", "--", "--device", "cpu"]
    assert became == [[sys.executable, sys.executable, "-P", *module, *rest]]


def test_serve_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.setattr(local_server, "_installed", lambda name: name not in ("pyzmq", "torch"))
    result = cli("serve", "--demo")
    assert result.exit_code == 78
    assert "pyzmq, torch is not installed" in result.stderr
    assert install_command("all") in " ".join(result.stderr.split())


# -- the screen


def test_control_characters_are_replaced() -> None:
    assert output.strip_control_chars("a\x1b]0;title\x07b\n\tc\x9b2J") == "a\ufffd]0;title\ufffdb\n\tc\ufffd2J"


def test_token_file_variable_differs_from_the_servers(
    cli: Any, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's LINECLEAR_TOKEN_FILE has a name beside each token."""
    own, of_server = tmp_path / "token", tmp_path / "tokens"
    own.write_text("secret\n")
    of_server.write_text("name secret\n")
    monkeypatch.setenv("LINECLEAR_TOKEN_FILE", str(of_server))
    assert cli("generate", "x").exit_code == 0
    assert "authorization" not in server.metadata[-1]
    monkeypatch.setenv("LINECLEAR_CLIENT_TOKEN_FILE", str(own))
    assert cli("generate", "x").exit_code == 0
    assert server.metadata[-1]["authorization"] == "Bearer secret"
