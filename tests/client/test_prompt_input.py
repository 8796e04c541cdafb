"""Prompts from pipes, FIFOs and files: every prompt gets its own answer, and a lost one is an error."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client.command import COMMAND, lines, process, run
from client.conftest import finished, started, tokens
from google.rpc.code_pb2 import Code
from support.time_limits import PATIENCE_SECONDS

from lineclear.cli import batch_run
from lineclear.cli.prompt_file import PromptFile
from lineclear.client import Request

PROMPTS = [f"prompt {n} {'of many letters ' * 40}".strip() for n in range(110)]
"""More than the 64 KiB that a pipe holds."""


def through_stdin(server: Any, name: str, text: str) -> Any:
    """Run the command with `text` in a pipe that is its standard input."""
    return process(server, "generate", "--file", name, input=text)


def through_fifo(server: Any, name: str, text: str) -> Any:
    """Run the command with `text` in a named pipe."""
    os.mkfifo(name)
    writer = threading.Thread(target=lambda: Path(name).write_text(text, "utf-8"))
    writer.start()
    done = process(server, "generate", "--file", name)
    writer.join(PATIENCE_SECONDS)
    return done


@pytest.mark.parametrize(
    ("run", "name"),
    [(through_stdin, "-"), (through_stdin, "/dev/stdin"), (through_fifo, "fifo")],
    ids=["stdin", "dev-stdin", "fifo"],
)
def test_every_prompt_of_a_pipe_gets_its_own_answer(
    server: Any, tmp_path: Path, run: Callable[..., Any], name: str
) -> None:
    server.play([started(), tokens(0, 1, text="an answer"), finished(1)])
    text = "".join(f"{prompt}\n" for prompt in PROMPTS)
    assert len(text) > 1 << 16
    done = run(server, str(tmp_path / name) if name == "fifo" else name, text)
    assert done.returncode == 0, done.stderr
    found = [(line["index"], line["prompt"], line["text"]) for line in lines(done.stdout)]
    assert found == [(index, prompt, "an answer") for index, prompt in enumerate(PROMPTS)]
    assert sorted(request.text for request in server.requests) == sorted(PROMPTS)


def test_invalid_line_of_a_pipe_is_reported_first(server: Any, cli: Any) -> None:
    done = cli("generate", "--file", "-", input='{"prompt": "fine"}\n{"prompt": 5}\n')
    assert (done.exit_code, done.stdout, server.requests) == (2, "", [])
    assert "standard input, line 2" in " ".join(done.stderr.split())


@pytest.mark.parametrize("change", ["three\n", "one\ntwo\nthree\nfour\nfive\n"], ids=["fewer", "more"])
def test_changed_prompt_file_is_data_loss(
    server: Any, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    several = batch_run.several

    def change_and_ask(*arguments: Any, **named: Any) -> int:
        path.write_text(change)
        return several(*arguments, **named)

    monkeypatch.setattr(batch_run, "several", change_and_ask)
    done = cli("generate", "--file", str(path))
    assert done.exit_code == 100 + Code.DATA_LOSS
    assert "3 prompts were counted" in done.stderr
    assert [(line["prompt"], line["text"]) for line in lines(done.stdout)] == [(p, p) for p in change.split()]


def test_results_of_other_prompts_are_not_resumed(cli: Any, server: Any, tmp_path: Path) -> None:
    first, second, out = tmp_path / "first.txt", tmp_path / "second.txt", tmp_path / "results.jsonl"
    first.write_text("a\nb\n")
    second.write_text("a\nc\nd\n")
    assert cli("generate", "--file", str(first), "--out", str(out)).exit_code == 0
    results = out.read_bytes()
    done = cli("generate", "--file", str(second), "--out", str(out), "--resume")
    assert done.exit_code == 2
    assert "line 2: is not the result of prompt 2" in " ".join(done.stderr.replace("│", " ").split())
    first.write_text("a\n")
    done = cli("generate", "--file", str(first), "--out", str(out), "--resume")
    assert done.exit_code == 2
    assert "2 results" in " ".join(done.stderr.replace("│", " ").split())
    assert out.read_bytes() == results
    assert len(server.requests) == 2


@pytest.mark.parametrize("kind", ["path", "link", "standard input"])
def test_results_never_replace_the_prompts(server: Any, tmp_path: Path, kind: str) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("one\ntwo\n")
    out.symlink_to(prompts)
    given = "-" if kind == "standard input" else str(prompts)
    with prompts.open() as stdin:
        words = [*COMMAND, "generate", "--file", given, "--out", str(prompts if kind == "path" else out)]
        done = subprocess.run(
            words,
            stdin=stdin,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert (done.returncode, "--out" in done.stderr) == (2, True), done.stderr
    assert prompts.read_text() == "one\ntwo\n"


@pytest.mark.parametrize("text", ["a note", "a note\nwithout an end", '{"index": 7, "te'])
def test_resume_leaves_a_file_of_something_else_alone(cli: Any, server: Any, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    out.write_text(text)
    done = cli("generate", "one", "two", "--out", str(out), "--resume")
    assert (done.exit_code, "--resume" in done.output) == (2, True)
    assert (out.read_text(), server.requests) == (text, [])


def test_json_has_every_character_in_any_encoding(server: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "\\ud800", "prompt": "日本"}\n')
    for encoding in ("utf-8", "ascii"):
        done = run(
            [*COMMAND, "generate", "--file", str(prompts)],
            LINECLEAR_TARGET=server.target, PYTHONIOENCODING=encoding, PYTHONUTF8="0",
        )  # fmt: skip
        (result,) = lines(done.stdout)
        assert (result["id"], result["prompt"], result["text"]) == ("\ud800", "日本", "日本"), done.stderr


def test_one_iteration_at_a_time() -> None:
    prompts = PromptFile(io.BytesIO(b"one\ntwo\n"), "text", Request.of)
    assert len(prompts) == 2
    assert [entry.shown["prompt"] for entry in prompts] == ["one", "two"]
    first = iter(prompts)
    next(first)
    with pytest.raises(RuntimeError, match="one iteration at a time"):
        next(iter(prompts))
