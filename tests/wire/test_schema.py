"""The .proto files: their stubs are fresh, every word of the public one is explained, buf finds nothing."""

from __future__ import annotations

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


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """`make stubs` writes them."""
    command = [sys.executable, str(PROTOS / "generate.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    made = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*_pb2*")}
    kept = {p.relative_to(PROTOS): p.read_text() for p in PROTOS.rglob("*_pb2*") if "__pycache__" not in p.parts}
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
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_source_info"]
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


def test_buf_lint_finds_nothing(buf: str) -> None:
    done = subprocess.run([buf, "lint"], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_buf_formats_nothing(buf: str) -> None:
    done = subprocess.run(
        [buf, "format", "--diff"], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
