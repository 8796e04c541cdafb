"""The lineclear command, run in this process by typer's runner: generate, the other commands, and exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.command import QUICK, lines
from client.test_every_parameter import VALUES
from google.rpc.code_pb2 import Code
from rich.console import Console

from lineclear import errors
from lineclear.cli import exit_status, output
from lineclear.cli.options import RequestFlags, SamplingFlags
from lineclear.client import Sampling, local_server
from lineclear.client.message_classes import Stats
from lineclear.client.requests import REQUEST_FIELDS, Request
from lineclear.client.results import from_proto
from lineclear.errors import LineclearError, tree
from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command
from lineclear.v1 import inference_pb2 as pb

# -- generate


def test_prompt_is_an_argument_or_standard_input(cli: Any, server: Any) -> None:
    for arguments, text in (("one two",), None), ((), "one two\n"), (("-",), "one two\n\n"):
        result = cli("generate", *arguments, input=text)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "one two\n", "")
    assert [request.text for request in server.requests] == ["one two", "one two", "one two\n"]


def test_every_parameter_is_an_option() -> None:
    flags = [option.name for option in SamplingFlags.options]
    assert sorted(flags) == sorted(field.name for field in dataclasses.fields(Sampling))
    no_flags = {"metadata", "on_queued", "response_format", "tools", "tool_choice", "parallel_tool_calls"}
    of_connection = {"on_model_change", "timeout_seconds"}
    of_request = {option.name for option in RequestFlags.options}
    assert of_request == REQUEST_FIELDS - no_flags - of_connection - {"add_generation_prompt", "queue_position"}


SEVERAL: dict[str, tuple[str | list[str], Any]] = {
    "logit_bias": (["5=1.5", "6=-2"], {5: 1.5, 6: -2}), "allowed_token_ids": ("1,2", [1, 2]),
    "banned_token_ids": ("3", [3]), "bad_words": (["x y", "z"], ["x y", "z"]), "stop": (["a", "b"], ["a", "b"]),
    "begin_banned_token_ids": ("4,5", [4, 5]), "dry_sequence_breakers": ("a b", ["a b"]),
    "stop_token_ids": ("8, 9", [8, 9]), "eos_token_ids": ("3", [3]), "logprob_token_ids": ("7,5", [7, 5]),
    "repetition_detection": ("20,4", {"max_pattern_size": 20, "min_count": 4, "min_pattern_size": 1}),
}  # fmt: skip
"""What is given for a flag that takes several values, and the value of the parameter."""
OF_ONE_OUTPUT = {"n", "best_of", "omit_text"}
"""Parameters that change more than the request: the server of these tests has one output, with text."""


def test_options_are_in_the_request(cli: Any, server: Any) -> None:
    flags = {option.name for option in (*SamplingFlags.options, *RequestFlags.options)} - OF_ONE_OUTPUT
    values: dict[str, Any] = {name: value for name, (_, value) in SEVERAL.items()}
    arguments = [
        word
        for name, (given, _) in SEVERAL.items()
        for text in ([given] if isinstance(given, str) else given)
        for word in (f"--{name.replace('_', '-')}", text)
    ]
    for name in flags - SEVERAL.keys() - {"json_schema", "grammar", "choice", "regex"}:  # json_object is the form
        values[name] = VALUES[name]
        arguments.append(f"--{name.replace('_', '-')}")
        if VALUES[name] is not True:
            arguments.append(str(VALUES[name]))
    result = cli("generate", "--json", "x", *arguments, "--header", "a=b=c")
    assert result.exit_code == 0, result.output
    assert server.requests == [Request.of("x", **values).to_proto()]
    assert server.metadata[0]["a"] == "b=c"
    assert server.metadata[0]["x-tenant-id"] == VALUES["tenant"]


def test_short_options(cli: Any, server: Any) -> None:
    cli("generate", "x", "-n", "9", "-T", "0", "-s", "a")
    cli("generate", "x")  # without options, fields are unset
    asked = Request.of("x", max_tokens=9, temperature=0, stop=["a"]).to_proto()
    assert server.requests == [asked, pb.GenerateRequest(text="x")]


def test_chat_and_token_id_prompts(cli: Any, server: Any) -> None:
    cli("generate", "x", "--system", "be kind")
    cli("generate", "x", "--chat")
    cli("generate", "--token-ids", "1,2")
    roles = [[turn.role for turn in request.chat.messages] for request in server.requests]
    assert roles == [["system", "user"], ["user"], []]
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
    found = [(line["index"], line["prompt"], line["text"]) for line in lines(cli("generate", "a", "b c", "d").stdout)]
    assert found == [(0, "a", "a"), (1, "b c", "b c"), (2, "d", "d")]


def test_prompt_file_of_text(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("\n".join(f"prompt {n}" for n in range(12)) + "\n\n", "utf-8")
    result = cli("generate", "--file", str(prompts), "--out", str(out), "-n", "5", "--concurrency", "4")
    assert (result.exit_code, result.stdout) == (0, "")
    assert [line["text"] for line in lines(out.read_text("utf-8"))] == [f"prompt {n}" for n in range(12)]
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


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: is not JSON, "),
        ("Tell me a joke", "--format"),
        ("[]", "`prompt` or `messages`"),
        ('{"text": "one", "max_tokens": 3}', "`prompt` or `messages`"),
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
    server.refused = {"bad": errors.PromptTooLong("too long")}
    result = cli("generate", "good", "bad", "good", *QUICK)
    assert result.exit_code == ExitCode.NEGATIVE
    assert [line.get("error", {}).get("reason") for line in lines(result.stdout)] == [None, "PROMPT_TOO_LONG", None]


def test_resume_continues_after_an_unavailable_server(cli: Any, server: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("a\nb\nc\nd\n", "utf-8")
    server.refused = {"c": errors.ShutdownInterrupted("gone")}
    arguments = ("generate", "--file", str(prompts), "--out", str(out), "--concurrency", "1", *QUICK)
    assert cli(*arguments).exit_code == 114
    assert [line["text"] for line in lines(out.read_text("utf-8"))] == ["a", "b"]
    with out.open("a") as file:
        file.write('{"index": 2, "prom')  # an incomplete line, as after a full disk
    server.refused = {}
    server.requests.clear()
    assert cli(*arguments, "--resume").exit_code == 0
    assert [(line["index"], line["text"]) for line in lines(out.read_text("utf-8"))] == list(enumerate("abcd"))
    asked = [request.text for request in server.requests]  # the cancelled "d" of the first run may arrive late
    assert (set(asked), asked.count("c")) == ({"c", "d"}, 1)


# -- exit codes


@pytest.mark.parametrize("kind", [kind for kind in tree() if kind not in (LineclearError, errors.UnknownStatus)])
def test_every_error_has_exit_code_and_message(cli: Any, server: Any, kind: type[LineclearError]) -> None:
    server.failures = [kind("what happened", violations=[errors.Violation("sampling.top_p", "is above 1")])]
    result = cli("generate", "x", "--json", *QUICK)
    assert result.exit_code == 100 + Code.Value(kind.code)
    assert "what happened" in result.stderr
    assert "sampling.top_p: is above 1" in result.stderr
    assert lines(result.stdout)[0]["error"]["reason"] == kind.reason


def test_version_and_help_need_no_server(cli: Any) -> None:
    result = cli("--version")
    assert (result.exit_code, result.output) == (0, f"lineclear {version('lineclear')}\n")
    text = " ".join(cli("--help").output.split())
    for code, number in Code.items():
        if code != "OK":
            assert f"{100 + number} {code}" in text
    for command in ("generate", "submit", "attach", "result", "chat", "health", "stats", "model", "tokenize"):
        result = cli(command, "--help")
        assert (result.exit_code, "--target" in result.output) == (0, True), command


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


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        *((["generate", "a", flag], flag) for flag in ("--logprobs", "--token-timings", "--omit-text", "--deltas")),
        *((["generate", "a", f"{flag}=1"], flag)
          for flag in ("--top-logprobs", "--prompt-logprobs", "--logprob-token-ids")),
        (["generate", "a", "b", "--deltas", "--json"], "--deltas"),
        (["generate", "a", "--concurrency", "2"], "--concurrency"),
        (["generate", "a", "--format", "text"], "--format"),
        (["generate", "a", "--resume"], "--resume"),
        *((["generate", "--token-ids", "1", *more], "--token-ids") for more in (["--chat"], ["--system", "x"])),
        (["attach", "a", "--deltas"], "--deltas"),
        *((["tokenize", "1", "--decode", more], "--decode") for more in ("--count", "--chat")),
        *(([*command, "--on-model-change", "restart"], "--on-model-change")
          for command in (["score", "a", "b"], ["embed", "a"], ["stats"], ["health"], ["model"], ["submit", "a"],
                          ["attach", "a"], ["result", "a"], ["cancel", "a"], ["tokenize", "a"], ["top"])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_option_without_effect_is_refused(cli: Any, server: Any, arguments: list[str], flag: str) -> None:
    result = cli(*arguments)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert flag in result.stderr
    assert server.requests == []


def test_json_options_are_taken_with_json_and_with_several_prompts(cli: Any, server: Any) -> None:
    for more in (["--json"], ["b"]):
        assert cli("generate", "a", "--logprobs", *more).exit_code == 0
    assert [request.output.logprobs for request in server.requests] == [True] * 3


def test_os_error_is_a_message(cli: Any) -> None:
    result = cli("generate", "--file", "/nonexistent/file")
    assert result.stderr == "error: /nonexistent/file: No such file or directory\n"


def unreachable(cause: str) -> errors.Unreachable:
    return errors.Unreachable(f"no answer from x:1: {cause}")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (unreachable("Tls handshake failed: OPENSSL_internal:WRONG_VERSION_NUMBER"), "without TLS"),
        (
            unreachable("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: self signed"),
            "--tls-ca",
        ),
        (unreachable("Failed to create security handshaker."), "--tls-ca"),
        (unreachable("Socket closed"), "--tls"),
        (unreachable("Connection refused"), "lineclear serve"),
        (errors.Unsupported("not offered at this address: admin methods are at --admin-listen"), "--admin-listen ADDR"),
        (errors.Unsupported("another"), None),
    ],
)
def test_error_has_a_hint(error: LineclearError, hint: str | None) -> None:
    found = exit_status.hint(error)
    assert found is None if hint is None else hint in (found or "")


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
    for figure in ("9.9", "draining", "17", "250.00", "221 MiB", "3072 MiB", "4.2 s"):
        assert figure in table
    found = lines(cli("stats", "--json", "--watch", "--count", "3", "--interval", "0.05").stdout)
    assert [line["counters"]["requests_finished"] for line in found] == [17, 17, 17]
    assert "between tokens" in cli("stats", "--watch", "--count", "2", "--interval", "0.05").stdout


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_stats_of_several_workers_fit_into_80_columns(count: int) -> None:
    sizes: dict[str, Any] = {"weight_bytes": 2**33, "kv_cache_bytes": 2**35, "num_blocks": 10**5, "steps": 10**8}
    workers = [pb.WorkerStats(index=i, state="joined", pid=4_100_000 + i, **sizes) for i in range(count)]
    with Console(width=80, file=io.StringIO()) as console, console.capture() as shown:
        console.print(output.stats_view(from_proto(Stats, pb.GetStatsResponse(workers=workers))))
    page = shown.get()
    assert "\N{HORIZONTAL ELLIPSIS}" not in page
    assert all(str(worker.pid) in page for worker in workers[1:])
    assert f"{count * 8192} MiB" in page


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
