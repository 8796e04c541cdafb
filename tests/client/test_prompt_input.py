"""Prompts from pipes, FIFOs and files: every prompt gets its own answer, and a lost one is an error."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client.command import lines, process
from google.rpc.code_pb2 import Code
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import answer, toy_service

from lineclear.cli import batch_run
from lineclear.cli.prompt_file import PromptFile
from lineclear.client import Request

PROMPTS = [f"prompt {n}" for n in range(200)]


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


def through_substitution(server: Any, name: str, text: str) -> Any:
    """Run the command with `text` in a pipe that is its file descriptor `name`, as the shell's <(command)."""
    reader, writer = os.pipe()
    sender = threading.Thread(target=lambda: os.fdopen(writer, "w").write(text))
    sender.start()
    done = process(server, "generate", "--file", f"/dev/fd/{reader}", pass_fds=(reader,))
    os.close(reader)
    sender.join(PATIENCE_SECONDS)
    return done


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (through_stdin, "-"),
        (through_stdin, "/dev/stdin"),
        (through_fifo, "fifo"),
        (through_substitution, "fd"),
    ],
    ids=["stdin", "dev-stdin", "fifo", "process-substitution"],
)
def test_every_prompt_of_a_pipe_gets_its_own_answer(
    server: Any, tmp_path: Path, run: Callable[..., Any], name: str
) -> None:
    path = str(tmp_path / name) if name == "fifo" else name
    done = run(server, path, "".join(f"{prompt}\n" for prompt in PROMPTS))
    found = [(line["index"], line["prompt"], line["text"]) for line in lines(done.stdout)]
    assert found == [(index, prompt, prompt) for index, prompt in enumerate(PROMPTS)]
    assert done.returncode == 0, done.stderr


def test_large_pipe_has_a_result_for_each_prompt(tmp_path: Path) -> None:
    prompts = [json.dumps({"id": n, "prompt": [5, 7], "seed": n}) for n in range(5000)]
    with toy_service(tmp_path, "--max-queue-size", "5000", num_blocks=2048) as service:
        flags = ["-n", "1", "--omit-text"]
        done = process(service, "generate", "--file", "-", *flags, input="\n".join(prompts))
    assert done.returncode == 0, done.stderr
    found = [(line["id"], line["token_ids"]) for line in lines(done.stdout)]
    assert found == [(n, answer([5, 7], 1, seed=n)) for n in range(5000)]


def test_invalid_line_of_a_pipe_is_reported_first(server: Any) -> None:
    done = process(server, "generate", "--file", "-", input='{"prompt": "fine"}\n{"prompt": 5}\n')
    assert (done.returncode, done.stdout, server.requests) == (2, "", [])
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


def test_one_iteration_at_a_time() -> None:
    prompts = PromptFile(io.BytesIO(b"one\ntwo\n"), "text", Request.of)
    assert len(prompts) == 2
    assert [entry.shown["prompt"] for entry in prompts] == ["one", "two"]
    first = iter(prompts)
    next(first)
    with pytest.raises(RuntimeError, match="one iteration at a time"):
        next(iter(prompts))
