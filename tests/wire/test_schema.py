"""The .proto files: fresh stubs, a comment on every public name, buf lint, no breaking change to the baseline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from support.buf import find_buf
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

PROTOS = REPOSITORY / "protos"
BASELINE = PROTOS / "baseline.binpb"


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """`make stubs` writes them."""
    command = [sys.executable, str(PROTOS / "generate.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    made = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*.py*")}
    kept = {
        p.relative_to(REPOSITORY): p.read_text()
        for root in ("protos", "common")
        for p in [*(REPOSITORY / root).rglob("*_pb2*.py*"), *(REPOSITORY / root).rglob("stats_help.py")]
        if "__pycache__" not in p.parts
    }
    assert sorted(made) == sorted(kept)
    assert [str(path) for path in made if made[path] != kept[path]] == []


# --- documentation -------------------------------------------------------------------------------------------------


def _undocumented(file: FileDescriptorProto) -> Iterator[str]:
    """Names of everything in a file that has no comment right above it."""
    commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}

    def message(proto: DescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
        yield from [name] * (path not in commented)
        for i, field in enumerate(proto.field):
            yield from [f"{name}.{field.name}"] * ((*path, 2, i) not in commented)
        for i, nested in enumerate(proto.nested_type):
            if nested.options.map_entry:  # made by the compiler; the field says what it is
                continue
            yield from message(nested, (*path, 3, i), f"{name}.{nested.name}")

    for i, proto in enumerate(file.message_type):
        yield from message(proto, (4, i), proto.name)
    for i, enum in enumerate(file.enum_type):
        yield from [enum.name] * ((5, i) not in commented)
        # Number 0 is the style guide's "unspecified": it means nothing, that is what it is for.
        yield from (v.name for j, v in enumerate(enum.value) if v.number and (5, i, 2, j) not in commented)
    for i, service in enumerate(file.service):
        yield from [service.name] * ((6, i) not in commented)
        yield from (f"{service.name}.{m.name}" for j, m in enumerate(service.method) if (6, i, 2, j) not in commented)


def _compile(folder: Path, out: Path, *files: str) -> FileDescriptorSet:
    include = [f"-I{folder}", f"-I{REPOSITORY / 'third_party'}", "--include_source_info"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *include]
    subprocess.run([*protoc, f"--descriptor_set_out={out}", *files], check=True, timeout=PATIENCE_SECONDS)
    return FileDescriptorSet.FromString(out.read_bytes())


def test_everything_public_is_explained(tmp_path: Path) -> None:
    files = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "lineclear/v1").glob("*.proto"))
    compiled = _compile(PROTOS, tmp_path / "set", *files)
    assert len(compiled.file) == len(files) > 1
    assert [f"{file.name}: {name}" for file in compiled.file for name in _undocumented(file)] == []


def test_what_is_not_explained_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.proto").write_text("""
        syntax = "proto3";
        message A {
          int32 x = 1;
          // Yes.
          int32 y = 2;
        }
        // Yes.
        enum E { E_ZERO = 0; E_ONE = 1; }
        // Yes.
        service S { rpc F(A) returns (A); }
    """)
    (file,) = _compile(tmp_path, tmp_path / "set", "a.proto").file
    assert list(_undocumented(file)) == ["A", "A.x", "E_ONE", "S.F"]


# --- buf -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buf() -> str:
    return find_buf()


def run_buf(buf: str, *arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run([buf, *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_buf_lint_finds_nothing(buf: str) -> None:
    done = run_buf(buf, "lint")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_buf_format_changes_nothing(buf: str) -> None:
    done = run_buf(buf, "format", "--diff")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_module_protos_is_the_public_api(buf: str) -> None:
    """`buf generate protos` compiles these files and no others."""
    done = run_buf(buf, "ls-files", "protos")
    assert done.stdout.split() == [f"protos/lineclear/v1/{name}.proto" for name in ("admin", "inference", "sampling")]


def test_the_public_api_has_no_breaking_change(buf: str) -> None:
    """Before the release of 0.1.0, `make baseline` may replace the baseline; afterwards docs/protocol.md says when."""
    done = run_buf(buf, "breaking", "protos", "--against", str(BASELINE))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("  uint64 handle = 1;", "  uint64 number = 1;", "FIELD_SAME_NAME"),
        ("  uint32 first_index = 1;", "", "FIELD_NO_DELETE"),
        ("  RESULT_STATE_FAILED = 4;", "", "ENUM_VALUE_NO_DELETE"),
        ('option java_package = "com.lineclear.v1";', 'option java_package = "v1";', "FILE_SAME_JAVA_PACKAGE"),
    ],
)
def test_a_breaking_change_is_found(buf: str, tmp_path: Path, old: str, new: str, rule: str) -> None:
    for root in ("protos", "common", "third_party"):
        shutil.copytree(REPOSITORY / root, tmp_path / root, ignore=shutil.ignore_patterns("*.py", "*.pyi"))
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    changed = tmp_path / "protos/lineclear/v1/inference.proto"
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new, 1))
    done = run_buf(buf, "breaking", "protos", "--against", str(BASELINE), "--error-format", "json", cwd=tmp_path)
    assert rule in {json.loads(line)["type"] for line in done.stdout.splitlines()}
