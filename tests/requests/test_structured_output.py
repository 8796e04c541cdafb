"""Forms of structured output are compiled within limits before a request is queued."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.serving import TOKENIZER, Serving, error_of, serving, text_request, until
from support.small_tokenizers import KINDS, byte_level, definition, save

from lineclear.errors import LineclearError, QueueFull
from lineclear.scheduler.requests.grammar_pool import GrammarPool
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1.sampling_pb2 import Choice, SamplingParams, StructuredOutput

OPTIONAL_RULES = "\n".join(
    ["start: " + " ".join(f"r{i}?" for i in range(3000)), *(f'r{i}: "w{i} "' for i in range(3000))]
)
"""It compiles, and has too many items for any token."""
SLOW = json.dumps({"type": "integer", "multipleOf": 9_999_991})
"""llguidance takes minutes to compile it."""


def asked(ignore_eos: bool = False, **form: Any) -> pb.GenerateRequest:
    return text_request(
        sampling=SamplingParams(structured_output=StructuredOutput(**form), ignore_eos=ignore_eos, temperature=0)
    )


async def refused(s: Serving, **form: Any) -> LineclearError:
    error = await error_of(s.generate(asked(**form)))
    assert not s.engine.submitted
    return error


def model(path: Path) -> Path:
    return save(path / "model", byte_level())


async def test_grammar_reaches_the_workers_before_the_request(tmp_path: Path) -> None:
    async with serving(tmp_path, model=model(tmp_path)) as s:
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        assert (await s.stub.GetModel(pb.GetModelRequest())).has_structured_output
        for form in (
            {"json_schema": '{"type": "integer"}'},
            {"json_object": True},
            {"regex": "a+"},
            {"choice": Choice(texts=['"a"', "\n", "é😀"])},
            {"grammar": "start: /x/"},
        ):
            assert [r async for r in s.generate(asked(**form))], form
            assert s.engine.submitted[-1].sampling.grammar == s.engine.prepared[-1] != ""


MAX_BYTES = 128 * 1024
INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({}, "form", "missing"),
    ({"regex": ""}, "regex", "empty"),
    ({"regex": "("}, "regex", "cannot be used"),
    ({"regex": "(?=a)a"}, "regex", "look-around"),
    ({"json_schema": "{"}, "json_schema", "no JSON"),
    ({"json_schema": "3"}, "json_schema", "no JSON object"),
    ({"json_schema": '{"type": "object", "not": {}}'}, "json_schema", "not"),
    ({"json_schema": json.dumps({"$ref": "#/nowhere"})}, "json_schema", "cannot be used"),
    ({"json_schema": '{"type": "integer", "minimun": 1}'}, "json_schema", "did you mean minimum"),
    ({"json_schema": '{"$ref": "#"}'}, "json_schema", "repeats itself"),
    ({"json_schema": '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'}, "json_schema", "use anyOf"),
    ({"regex": r"[^\s\S]"}, "regex", "empty class"),
    ({"grammar": "start: a\na: a"}, "grammar", "repeats itself"),
    ({"grammar": 'start: "x" a\na: a'}, "grammar", "repeats itself"),
    ({"grammar": OPTIONAL_RULES}, "grammar", "items"),
    ({"json_object": False}, "json_object", "true"),
    ({"choice": Choice()}, "choice.texts", "empty"),
    ({"choice": Choice(texts=["a", ""])}, "choice.texts[1]", "empty"),
    ({"grammar": "begin: /x/"}, "grammar", "cannot be used"),
    ({"regex": "a", "constraint_start": "x" * 65}, "constraint_start", "64 bytes"),
    ({"regex": "a", "ignore_eos": True}, "", "ends the answer"),
    ({"json_object": True, "json_whitespace": 9}, "json_whitespace", "JSON_WHITESPACE_ANY"),
    ({"regex": "a" * (MAX_BYTES + 1)}, "regex", f"the limit is {MAX_BYTES} (--max-grammar-bytes)"),
    ({"choice": Choice(texts=["a" * 1024] * 130)}, "choice.texts", f"the limit is {MAX_BYTES} (--max-grammar-bytes)"),
    ({"choice": Choice(texts=["a"] * 4097)}, "choice.texts", "more than 4096 entries"),
]


async def test_invalid_form_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with serving(tmp_path, model=model(tmp_path), max_grammar_bytes=MAX_BYTES) as s:
        for form, field, problem in INVALID:
            error = await refused(s, **form)
            assert error.code == "INVALID_ARGUMENT"
            assert [v.field for v in error.violations] == [f"sampling.structured_output.{field}".rstrip(".")], form
            assert problem in error.violations[0].description, form


HOSTILE = {
    "slow": SLOW,
    "deep": "[" * 150_000,
    "deep object": '{"items":' * 80 + "{}" + "}" * 80,
    "recursive": json.dumps({"$ref": "#"}),
    "exponential": json.dumps(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(12)]}
    ),
    "many": json.dumps({"anyOf": [{"const": f"{i}" * 9} for i in range(9000)]}),
    "repeats": json.dumps({"type": "string", "pattern": "^((a{1,999}b?){1,999}c?){1,999}$"}),
}


async def test_hostile_schema_is_refused_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests are answered meanwhile, and the next form is compiled as before."""
    monkeypatch.setattr("lineclear.scheduler.requests.grammar_pool._MAX_CACHED", 2)
    async with serving(tmp_path, model=model(tmp_path), max_grammar_seconds=0.3) as s:
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        calls = {name: s.generate(asked(json_schema=schema)) for name, schema in HOSTILE.items()}
        waiting = asyncio.gather(*map(error_of_or_none, calls.values()))
        for _ in range(20):
            assert [r async for r in s.generate(text_request())]
        errors = dict(zip(calls, await waiting, strict=True))
        for name in ("slow", "deep", "deep object", "recursive"):
            assert errors[name] is not None, name
        assert all(error is None or error.code == "INVALID_ARGUMENT" for error in errors.values())
        assert "0.3 s of CPU time" in str(errors["slow"])
        assert [r async for r in s.generate(asked(regex="a"))]


async def error_of_or_none(call: Any) -> LineclearError | None:
    try:
        return await error_of(call)
    except AssertionError:
        return None


async def test_form_is_compiled_once(tmp_path: Path) -> None:
    """Refused ones too: nobody can make the server compile the same slow schema again and again."""
    async with serving(tmp_path, model=model(tmp_path), max_grammar_seconds=0.3) as s:
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        first = await asyncio.gather(*(refused(s, json_schema=SLOW) for _ in range(5)))
        await until(lambda: s.service.grammars.processes.num_idle == 1)  # in place of the process that compiled it
        pids = s.service.grammars.processes.pids
        again = await refused(s, json_schema=SLOW)
        assert {str(error) for error in (*first, again)} == {str(again)}
        assert s.service.grammars.processes.pids == pids


async def test_form_that_met_a_full_queue_is_compiled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineclear.scheduler.requests.limited_processes.num_processes", lambda cores: 1)
    pool = GrammarPool(model(tmp_path), SchedulerSettings(max_queue_size=1))
    first, second = StructuredOutput(regex="a+"), StructuredOutput(regex="b+")
    try:
        compiling = asyncio.gather(pool.grammar(first), pool.grammar(StructuredOutput(regex="c+")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await pool.grammar(second)
        await compiling
        assert await pool.grammar(second) != await pool.grammar(first)
    finally:
        pool.close()


async def test_short_form_overtakes_long_ones_of_its_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in forms: at most the long ones in progress end before it."""
    monkeypatch.setattr("lineclear.scheduler.requests.limited_processes.num_processes", lambda cores: 2)
    async with serving(tmp_path, model=model(tmp_path)) as s:
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        ended: list[str] = []

        async def answer(name: str, schema: Any) -> None:
            assert [r async for r in s.generate(asked(json_schema=json.dumps(schema)))]
            ended.append(name)

        pattern = {"type": "string", "pattern": "^[a-z]{1,50}$"}
        long = [{"anyOf": [{"properties": {f"k{n}_{i}": pattern}} for i in range(40)]} for n in range(12)]
        tasks = [asyncio.ensure_future(answer("long", schema)) for schema in long]
        await until(lambda: s.service.grammars.processes.turns.num_waiting == 11)
        await answer("short", {"type": "integer"})
        assert ended.count("long") <= 2, ended
        await asyncio.gather(*tasks)


async def test_processes_give_way_to_the_scheduler_and_the_worker(tmp_path: Path) -> None:
    """Niceness counts within a session only, where Linux has autogroups."""
    async with serving(tmp_path, model=model(tmp_path)) as s:
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        assert [r async for r in s.generate(asked(regex="a"))]
        (pid,) = s.service.grammars.processes.pids
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid, "signals of the terminal do not reach it"
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


async def test_killed_process_is_replaced(tmp_path: Path) -> None:
    async with serving(tmp_path, model=model(tmp_path)) as s:
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        assert [r async for r in s.generate(asked(regex="a"))]
        slow = s.generate(asked(json_schema=SLOW))
        for pid in s.service.grammars.processes.pids:
            os.kill(pid, signal.SIGKILL)
        error = await error_of(slow)
        assert error.retry_after_seconds or error.code == "INVALID_ARGUMENT"
        assert [r async for r in s.generate(asked(regex="b"))]


@pytest.mark.parametrize("kind", KINDS)
async def test_tokenizer_without_bytes_has_no_structured_output(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind]()
    tokenizer = Tokenizer(definition(made))
    async with serving(tmp_path, tokenizer=tokenizer, model=save(tmp_path / "model", made)) as s:
        s.engine.answer = lambda request: [300]
        available = (await s.stub.GetModel(pb.GetModelRequest())).has_structured_output
        assert available == (kind not in ("unigram", "word_level", "word_piece"))
        if available:
            assert [r async for r in s.generate(asked(regex="a"))]
        else:
            error = await refused(s, regex="a")
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", "NO_STRUCTURED_OUTPUT")
