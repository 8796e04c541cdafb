"""Write the reference pages from code.

docs/configuration.md comes from the settings, docs/protocol.md from the .proto files and the error tree,
docs/exit-codes.md from lineclear.exit_codes, docs/reliability.md from tests/faults.yaml, docs/images/speed.svg from the
README. A test compares them with fresh ones.

    python docs/generate.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import reliability
import speed_chart
from google.protobuf import descriptor_pb2 as pb
from google.rpc.code_pb2 import Code
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from lineclear.errors import LineclearError, UnknownStatus, tree
from lineclear.exit_codes import TABLE, of_grpc
from lineclear.process.flag_aliases import names_of
from lineclear.process.setting_fields import flag_of, groups
from lineclear.process.settings_help import description
from lineclear.scheduler.metrics_export import VLLM_NAMES, families
from lineclear.scheduler.requests.request_metrics import ServerStats
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb2
from lineclear.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = (
    "lineclear/v1/inference.proto",
    "lineclear/v1/sampling.proto",
    "lineclear/v1/admin.proto",
    "lineclear/v1/steps.proto",
)
COMPATIBILITY = (
    "## Compatibility of v1",
    "",
    "Before release 1.0 of lineclear, a minor release (0.2, 0.3) may break `lineclear.v1`; the changelog lists each",
    "change. A patch release adds fields, enum values, RPCs and reasons of errors, and breaks no client. From 1.0 on,",
    "a breaking change needs a package `lineclear.v2`. The tests compare the schema with the last release's image,",
    "`protos/baseline.binpb`, with `buf breaking`. Clients ignore unknown fields, treat unknown enum values as",
    "unspecified, and treat errors with unknown reasons by their gRPC code. `lineclear.wire.v1` is private to a",
    "release: it connects the scheduler and the worker.",
)
SCALARS = {
    pb.FieldDescriptorProto.TYPE_BOOL: "bool",
    pb.FieldDescriptorProto.TYPE_DOUBLE: "double",
    pb.FieldDescriptorProto.TYPE_FLOAT: "float",
    pb.FieldDescriptorProto.TYPE_INT32: "int32",
    pb.FieldDescriptorProto.TYPE_STRING: "string",
    pb.FieldDescriptorProto.TYPE_UINT32: "uint32",
    pb.FieldDescriptorProto.TYPE_UINT64: "uint64",
}


def configuration() -> str:
    """The page of settings."""
    return "\n".join(
        [
            "# Configuration",
            "",
            "Made from the settings classes by `docs/generate.py`; do not edit.",
            "",
            "A flag beats an environment variable, which beats the file named by `--config` (scheduler), which",
            "beats the default. A key of the file is the flag's name with underscores. Units are in the names.",
            "",
            '"Also" are names of vLLM, SGLang, TGI and llama.cpp for the same quantity. They are accepted as flags,',
            "environment variables and keys of the file: `--max-num-seqs`, `LINECLEAR_MAX_NUM_SEQS`, `max_num_seqs`.",
            "If a setting has several names in the environment or in the file, its own counts.",
            "",
            "Both processes log their settings once, at start: all of them in JSON, those that differ from the default",
            "in text.",
            "",
            "`lineclear serve` and `lineclear-scheduler --spawn-worker` start the worker too. Flags after a lone `--`",
            "are the worker's: `lineclear serve --model DIR --max-batch-size 32 -- --dtype bfloat16`.",
            "",
            "## lineclear-scheduler",
            "",
            *_settings(SchedulerSettings),
            "## lineclear-worker",
            "",
            *_settings(WorkerSettings),
        ]
    )


def _settings(kind: type[BaseSettings]) -> Iterator[str]:
    prefix = kind.model_config.get("env_prefix", "")
    for title, fields in groups(kind).items():
        yield from (f"### {title}", "", "| flag | environment | default | meaning |", "|---|---|---|---|")
        for name, field in fields.items():
            meaning = _cell(description(kind, field)) + _choices(field) + _aliases(name)
            yield f"| `{flag_of(name)}` | `{prefix}{name.upper()}` | {_default(field)} | {meaning} |"
        yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value == "":
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _choices(field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    return ""


def _aliases(name: str) -> str:
    aliases = names_of(name)[1:]
    return " Also " + ", ".join(f"`{flag_of(alias)}`" for alias in aliases) + "." if aliases else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def protocol() -> str:
    """The page of the gRPC interface and its errors."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        flags = [
            "--include_source_info",
            "--include_imports",
            f"--descriptor_set_out={out}",
            *(f"-I{ROOT / root}" for root in ("protos", "third_party")),
        ]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *PUBLIC], check=True)
        files = {file.name: file for file in pb.FileDescriptorSet.FromString(out.read_bytes()).file}
    lines = ["# Protocol", "", "Made from `protos/` by `docs/generate.py`; do not edit.", "", *COMPATIBILITY, ""]
    for name in PUBLIC:
        lines += _file(files[name])
    lines += [
        "## Errors",
        "",
        "The status details carry google.rpc.ErrorInfo with domain `lineclear` and one of these reasons, BadRequest",
        "with the fields at fault, and RetryInfo where the same call may succeed later.",
        "",
        "| gRPC code | reason | Python class | meaning |",
        "|---|---|---|---|",
    ]
    for kind in tree():
        if kind not in (LineclearError, UnknownStatus):
            meaning = _cell((kind.__doc__ or "").split("\n\n")[0])
            lines.append(f"| {kind.code} | {kind.reason} | `{kind.__name__}` | {meaning} |")
    return "\n".join([*lines, ""])


def exit_codes() -> str:
    """The page of exit codes."""
    lines = [
        "# Exit codes",
        "",
        "Made from `lineclear.exit_codes` by `docs/generate.py`; do not edit.",
        "",
        "A code has one meaning. `lineclear serve` becomes the scheduler and exits with its codes. Other `lineclear`",
        "commands exit with a code marked `command`, or with 100 plus the gRPC code of the error. For a process killed",
        "by a signal, shells and container runtimes show 128 plus the signal: 137 is SIGKILL, often sent by the kernel",
        "when memory runs out. A traceback with code 1 is a bug.",
        "",
        "| code | program | meaning | restart |",
        "|---|---|---|---|",
        *(f"| {row.code:d} | {row.program} | {_cell(row.meaning)} | {row.restart} |" for row in TABLE),
        "",
        "## Errors of calls",
        "",
        "| code | gRPC code |",
        "|---|---|",
        *(f"| {of_grpc(number)} | {code} |" for code, number in Code.items() if code != "OK"),
        "",
    ]
    return "\n".join(lines)


def metrics() -> str:
    """Return the page of Prometheus metrics."""
    lines = [
        "# Metrics",
        "",
        "Made from `lineclear.scheduler.metrics_export` by `docs/generate.py`; do not edit.",
        "",
        "`--metrics-listen HOST:PORT` serves these at any path, in the text format 0.0.4; `?name[]=...` selects some.",
        "A metric that vLLM has with the same meaning appears under both names. Histograms count requests that",
        "finished. No label has a request id, a tenant, a model name or content.",
        "",
        "| metric | type | meaning | vLLM's name |",
        "|---|---|---|---|",
    ]
    for family in families(pb2.GetStatsResponse(), ServerStats(0.0), certificate_expires_at=0.0):
        if family.name.startswith("lineclear"):
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            labels = "".join(f"{{{label}}}" for label in getattr(family, "_labelnames", ()))
            theirs = f"`{VLLM_NAMES[family.name]}{suffix}`" if family.name in VLLM_NAMES else ""
            lines.append(
                f"| `{family.name}{suffix}{labels}` | {family.type} | {_cell(family.documentation)} | {theirs} |"
            )
    return "\n".join([*lines, ""])


def _file(file: pb.FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(where.path): where.leading_comments.strip() for where in file.source_code_info.location}
    for s, service in enumerate(file.service):
        yield from (f"## {service.name}", "", comments.get((6, s), ""), "")
        for m, method in enumerate(service.method):
            asks = "stream " if method.client_streaming else ""
            stream = "stream " if method.server_streaming else ""
            answer = f"{stream}{_short(method.output_type)}"
            yield from (f"### {method.name}({asks}{_short(method.input_type)}) → {answer}", "")
            yield from (comments.get((6, s, 2, m), ""), "")
    yield from (f"## Messages of `{file.name}`", "")
    for m, message in enumerate(file.message_type):
        yield from (f"### {message.name}", "", comments.get((4, m), ""), "")
        if message.field:
            yield "| field | type | meaning |"
            yield "|---|---|---|"
        for f, field in enumerate(message.field):
            yield f"| `{field.name}` | {_type(field)} | {_cell(comments.get((4, m, 2, f), ''))} |"
        yield ""
    for e, enum in enumerate(file.enum_type):
        yield from (f"### {enum.name}", "", comments.get((5, e), ""), "", "| value | meaning |", "|---|---|")
        for v, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {_cell(comments.get((5, e, 2, v), ''))} |"
        yield ""


def _type(field: pb.FieldDescriptorProto) -> str:
    name = SCALARS.get(field.type) or _short(field.type_name)
    if name.endswith("Entry"):  # the only maps there are
        return "map<string, string>"
    if field.label == pb.FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _short(type_name: str) -> str:
    return type_name.removeprefix(".lineclear.v1.").removeprefix(".")


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    out = parser.parse_args().out
    (out / "configuration.md").write_text(configuration(), encoding="utf-8")
    (out / "exit-codes.md").write_text(exit_codes(), encoding="utf-8")
    (out / "metrics.md").write_text(metrics(), encoding="utf-8")
    (out / "protocol.md").write_text(protocol(), encoding="utf-8")
    (out / "reliability.md").write_text(reliability.page(), encoding="utf-8")
    (out / "images").mkdir(exist_ok=True)
    (out / "images/speed.svg").write_text(speed_chart.chart(), encoding="utf-8")


if __name__ == "__main__":
    main()
