"""Settings of both processes: error sentences, aliases and --help."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
import trustme
from pydantic_settings import BaseSettings
from structlog.testing import capture_logs
from support.sources import ROOTS

from lineclear.process import command_line
from lineclear.process.flag_aliases import ALIASES, OTHER_SERVERS, flags_of_worker, names_of
from lineclear.process.setting_fields import flag_of, groups
from lineclear.process.settings_base import ConfigurationError
from lineclear.process.settings_help import description
from lineclear.scheduler import settings as of_scheduler
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.worker import settings as of_worker


class Program(NamedTuple):
    kind: type[BaseSettings]
    load: Callable[[list[str]], Any]
    required: list[str]


SCHEDULER = Program(of_scheduler.SchedulerSettings, lambda words: of_scheduler.load(words)[0], [])
WORKER = Program(of_worker.WorkerSettings, of_worker.load, ["--model", "m", "--socket-directory", "/d"])
SETTINGS = [(p, name) for p in (SCHEDULER, WORKER) for name in p.kind.model_fields]
IDS = [f"{program.kind.__name__}-{name}" for program, name in SETTINGS]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LINECLEAR_"):
            monkeypatch.delenv(name)


def problem(program: Program, words: list[str], name: str = "") -> str:
    kept = dict(zip(program.required[::2], program.required[1::2], strict=True))
    kept.pop(f"--{name.replace('_', '-')}", None)
    with pytest.raises(ConfigurationError) as caught:
        program.load([*(word for pair in kept.items() for word in pair), *words])
    return str(caught.value)


def names_a_field(program: Program, sentence: str) -> list[str]:
    """Return the fields that a sentence names as the code does, without words that are values of a setting too."""
    fields = program.kind.model_fields
    values = {value for field in fields.values() for value in get_args(field.annotation)}
    return [n for n in fields if "_" in n and n not in values and re.search(rf"(?<![\w/]){n}\b", sentence)]


WHOLE, ABOVE = " is not a whole number from 1 to 4096", " is not a number above 0 and at most 3600"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(("max_batch_size", value, WHOLE) for value in ("many", "0", "4097", "-1", "1.5")),
        *(("stall_timeout_seconds", value, ABOVE) for value in ("0", "3601", "nan", "soon")),
        ("preemption_policy", "maybe", " is not one of cheapest, newest"),
        ("metrics_listen", "unix:/m", ": give host:port; Prometheus cannot read from a unix socket"),
        ("status_listen", "unix:/m", ": give host:port; a browser cannot connect to a unix socket"),
        ("output_length_estimator", "mine", ": give none, learned, or module:factory"),
        ("worker_command", "python -m 'mine", ": No closing quotation"),
        ("tenant_weights", "a=0", ": a=0 is not name=weight with a weight from 0.01 to 100"),
        ("lora_modules", "a=/x, a=/y", ": a=/y is not name=folder with a name of its own"),
    ],
)
def test_bad_value_is_named_as_given(
    name: str, value: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, variable, file = flag_of(name), f"LINECLEAR_{name.upper()}", tmp_path / "lineclear.toml"
    assert problem(SCHEDULER, [f"{flag}={value}"]) == f"{flag}={value}{says}"
    if not value.startswith("-"):
        assert problem(SCHEDULER, [flag, value]) == f"{flag} {shlex.quote(value)}{says}"
    file.write_text(f"{name} = {json.dumps(value)}\n")
    assert problem(SCHEDULER, ["--config", str(file)]) == f"{name} = {json.dumps(value)} in {file}{says}"
    monkeypatch.setenv(variable, value)
    assert problem(SCHEDULER, []) == f"{variable}={shlex.quote(value)}{says}"
    assert not names_a_field(SCHEDULER, problem(SCHEDULER, []))


def test_value_of_another_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("model = 3\nprefix_cache = 7\n")
    assert problem(SCHEDULER, ["--config", f"{tmp_path}/f"]).splitlines() == [
        f"model = 3 in {tmp_path}/f is not a text",
        f"prefix_cache = 7 in {tmp_path}/f is not true or false",
    ]
    monkeypatch.setenv("LINECLEAR_WORKER_MODEL", "")
    assert problem(WORKER, [], "model") == "LINECLEAR_WORKER_MODEL='' is not a text that is not empty"


@pytest.mark.parametrize(("program", "name"), SETTINGS, ids=IDS)
def test_flag_without_value_lists_allowed_values(program: Program, name: str) -> None:
    field, flag = program.kind.model_fields[name], f"--{name.replace('_', '-')}"
    if field.annotation is bool:
        said = problem(program, [f"{flag}=maybe"], name)
        assert said == f"{flag}=maybe: {flag} takes no value; write {flag} or --no-{flag[2:]}"
    else:
        said = problem(program, [flag], name)
        assert said.startswith(f"{flag} has no value; give "), said
        assert not names_a_field(program, said), said


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_contradiction_is_named_as_given(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, file = ["--min-batch-size=9", "--max-batch-size=8"], tmp_path / "lineclear.toml"
    names = "--min-batch-size", "--max-batch-size"
    if source == "variable":
        words, names = [], ("LINECLEAR_MIN_BATCH_SIZE", "LINECLEAR_MAX_NUM_SEQS")
        for name, value in zip(names, "98", strict=True):
            monkeypatch.setenv(name, value)
    elif source == "file":
        file.write_text("min_batch_size = 9\nmax_batch_size = 8\n")
        words, names = ["--config", str(file)], (f"min_batch_size in {file}", f"max_batch_size in {file}")
    assert problem(SCHEDULER, words) == f"{names[0]} (9) is larger than {names[1]} (8)"


def test_last_of_several_flags_is_named() -> None:
    said = problem(SCHEDULER, ["--max-batch-size", "3", "--max-batch-size=0"])
    assert said == "--max-batch-size=0 is not a whole number from 1 to 4096"


def test_switch_with_value_is_rejected() -> None:
    said = problem(SCHEDULER, ["--no-reflection=yes"])
    assert said == "--no-reflection=yes: --reflection takes no value; write --reflection or --no-reflection"


def test_variable_beats_file_in_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lineclear.toml"
    file.write_text("max_batch_size = -1\n")
    monkeypatch.setenv("LINECLEAR_MAX_BATCH_SIZE", "0")
    said = problem(SCHEDULER, ["--config", str(file)])
    assert said == "LINECLEAR_MAX_BATCH_SIZE=0 is not a whole number from 1 to 4096"


@pytest.mark.parametrize("program", [SCHEDULER, WORKER], ids=["scheduler", "worker"])
def test_every_alias_is_a_flag_of_its_setting(program: Program) -> None:
    aliases = {alias: name for name in program.kind.model_fields for alias in names_of(name)[1:]}
    assert len(aliases) >= 10
    for alias, name in aliases.items():
        value = "" if program.kind.model_fields[name].annotation is bool else "=1"
        assert list(command_line.parse(program.kind, [f"{flag_of(alias)}{value}"])[0]) == [name]


def test_an_alias_has_one_meaning() -> None:
    settings = {name for _, name in SETTINGS}
    aliases = [alias for names in ALIASES.values() for alias in names]
    assert ALIASES.keys() <= settings
    assert len({*aliases}) == len(aliases)
    assert not {*aliases} & settings
    assert not {flag_of(name) for name in (*aliases, *settings)} & OTHER_SERVERS.keys()
    mentioned = {flag for hint in OTHER_SERVERS.values() for flag in re.findall(r"--[a-z-]*[a-z]", hint)}
    assert mentioned <= {flag for name in settings for flag in (flag_of(name), f"--no-{flag_of(name)[2:]}")}


def flags_of(program: Program) -> set[str]:
    fields = program.kind.model_fields.items()
    names = {name: field.annotation is bool for setting, field in fields for name in names_of(setting)}
    return {flag_of(name) for name in names} | {flag_of(f"no_{name}") for name, is_switch in names.items() if is_switch}


def test_a_flag_of_the_worker_is_suggested_where_it_has_it() -> None:
    ours, theirs = map(flags_of, (SCHEDULER, WORKER))
    assert set(flags_of_worker()) == theirs - ours
    for flag in flags_of_worker():
        said = problem(SCHEDULER, [flag, "1"])
        assert said == (
            f"there is no flag {flag}; it is a flag of the worker, which come after a lone `--`: -- {flag} 1"
        )


def test_no_flag_of_the_migration_page_is_unknown() -> None:
    """Each is a flag here, or has a sentence."""
    page = (Path(__file__).parents[1] / "docs/migrating.md").read_text(encoding="utf-8")
    tables = [part for part in page.split("\n## ") if part.startswith(("Flags", "llama.cpp server"))]
    first = [line.split(" | ")[0] for part in tables for line in part.splitlines() if line.startswith("| `")]
    there = {flag for cell in first for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", cell)}
    assert len(there) > 30
    known = {*flags_of(SCHEDULER), *flags_of_worker(), *OTHER_SERVERS}
    assert there <= known


@pytest.mark.parametrize(
    ("words", "variables", "entry", "expected"),
    [
        (["--max-num-seqs", "3"], {}, "", 3),
        (["--max-num-seqs=3", "--max-batch-size=4"], {}, "", 4),
        (["--max-batch-size=4", "--max-num-seqs=3"], {}, "", 3),
        ([], {"MAX_NUM_SEQS": "5"}, "", 5),
        ([], {"MAX_NUM_SEQS": "5", "MAX_BATCH_SIZE": "6"}, "", 6),
        ([], {}, "max_num_seqs = 7", 7),
        ([], {"MAX_NUM_SEQS": "5"}, "max_batch_size = 7", 5),
        ([], {"MAX_BATCH_SIZE": "5"}, "max_num_seqs = 7", 5),
        (["--max-num-seqs=1"], {"MAX_BATCH_SIZE": "5"}, "max_batch_size = 7", 1),
        (["--max-batch-size=1"], {"MAX_NUM_SEQS": "5"}, "max_num_seqs = 7", 1),
    ],
)
def test_aliases_work_in_flags_variables_and_file(
    words: list[str],
    variables: dict[str, str],
    entry: str,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "lineclear.toml"
    file.write_text(entry)
    for program in (SCHEDULER, WORKER):
        if entry and program is WORKER:
            continue
        for name, value in variables.items():
            monkeypatch.setenv(f"{program.kind.model_config['env_prefix']}{name}", value)
        config = ["--config", str(file)] if entry else []
        assert program.load([*program.required, *config, *words]).max_batch_size == expected


def test_a_switch_has_aliases_too() -> None:
    assert SCHEDULER.load(["--no-enable-prefix-caching"]).prefix_cache is False
    assert SCHEDULER.load(["--no-prefix-cache", "--enable-prefix-caching"]).prefix_cache is True


def test_wrong_alias_is_named_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lineclear.toml"
    file.write_text("max_num_seqs = 0\n")
    limits = "is not a whole number from 1 to 4096"
    assert problem(SCHEDULER, ["--config", str(file)]) == f"max_num_seqs = 0 in {file} {limits}"
    monkeypatch.setenv("LINECLEAR_MAX_NUM_SEQS", "0")
    assert problem(SCHEDULER, ["--config", str(file)]) == f"LINECLEAR_MAX_NUM_SEQS=0 {limits}"
    assert problem(SCHEDULER, ["--max-num-seqs=0"]) == f"--max-num-seqs=0 {limits}"
    assert problem(SCHEDULER, ["--max-num-seq=0"]) == "there is no flag --max-num-seq; is it --max-num-seqs?"


def help_of(program: Program, words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        program.load(words)
    assert caught.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("program", [SCHEDULER, WORKER], ids=["scheduler", "worker"])
def test_help_lists_each_setting_in_one_group(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(program, ["--help"], capsys)
    assert max(map(len, lines)) <= 100
    assert program is WORKER or "lineclear-worker --help" in " ".join(lines)
    lines = lines[lines.index("Model:") :]
    titles = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert titles[-1] == "Other"
    assert titles[:-1] == list(groups(program.kind))
    of_group: dict[str, str] = {}
    title = ""
    for line in lines:
        title = line.removesuffix(":") if re.fullmatch(r"[A-Z].*:", line) else title
        if found := re.match(r"  --(?:\[no-\])?([a-z-]+) (.*)", line):
            name = found[1].replace("-", "_")
            assert name not in of_group, name
            of_group[name] = title
            assert len(found[2].split("  ")[-1].strip()) > 10, line  # a meaning, on the same line
    assert of_group.pop("version") == "Other"
    assert of_group.keys() == program.kind.model_fields.keys()
    assert "Other" not in of_group.values()
    sizes = [list(of_group.values()).count(title) for title in titles[:-1]]
    assert max(sizes) <= 20, "a group of everything is no group"


@pytest.mark.parametrize(("program", "name"), SETTINGS, ids=IDS)
def test_every_number_is_bounded_above(program: Program, name: str) -> None:
    field = program.kind.model_fields[name]
    if field.annotation in (int, float):
        assert {type(rule).__name__ for rule in field.metadata} & {"Le", "Lt"}


@pytest.mark.parametrize(("program", "name"), SETTINGS, ids=IDS)
def test_help_describes_one_setting(program: Program, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    field = program.kind.model_fields[name]
    lines = help_of(program, [f"--help={name.replace('_', '-')}"], capsys)
    assert max(map(len, lines)) <= 100 or get_origin(field.annotation) is Literal
    said = " ".join(" ".join(lines).split())
    assert " ".join(description(program.kind, field).split()) in said
    assert not names_a_field(program, said)
    assert f"{program.kind.model_config['env_prefix']}{name.upper()}" in said


def test_help_suggests_the_nearest_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(SCHEDULER, ["--help=--max-batch-sise"], capsys) == [
        "there is no setting --max-batch-sise; is it --max-batch-size?"
    ]


def sentences(source: str) -> Iterator[str]:
    """Yield every text of several words that is no docstring."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text and id(node) not in alone:
                yield text


def test_sentences_name_settings_by_flag() -> None:
    """Clients forward a sentence to the operator, who can change the flag."""
    names = "|".join(sorted({name for _, name in SETTINGS if "_" in name}))
    field = re.compile(rf"(?<![\w.-])(?<!--speculative-method )({names})(?![\w.=])")
    found = [
        f"{path.name}: {sentence}"
        for root in ROOTS
        for path in sorted(root.rglob("*.py"))
        if path.name != "settings.py"
        for sentence in sentences(path.read_text(encoding="utf-8"))
        if field.search(sentence)
    ]
    assert found == []


def test_reload_error_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    leaf = trustme.CA().issue_cert("localhost")
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    monkeypatch.setenv("LINECLEAR_TLS_CERT_FILE", str(certificate))
    settings, _ = of_scheduler.load(["--tls-key-file", str(key)])
    monkeypatch.setattr("lineclear.scheduler.security.reloading_file.CHECK_SECONDS", 0.0)
    serving = ServerCertificates(settings)
    certificate.unlink()
    with capture_logs() as lines:
        assert serving.expires_at
    assert [line["problem"] for line in lines] == [f"LINECLEAR_TLS_CERT_FILE {certificate}: No such file or directory"]
