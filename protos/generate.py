"""Write the Python stubs and their type stubs from the .proto files, in place.

    python protos/generate.py [--out FOLDER]

Run with the oldest supported grpcio-tools (pinned in the `dev` extra): stubs refuse runtimes older than their compiler.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT = Path(__file__).resolve().parents[1]
STATS = ("GetStatsResponse", "Counters", "Gauges", "WorkerStatus", "WorkerStats")


def generate(out: Path) -> None:
    """Compile the .proto files of each source root into the same root below `out`. Raises CalledProcessError."""
    bin_folder = Path(sys.executable).parent
    include = [f"-I{ROOT / root}" for root in ("protos", "common", "third_party")]
    for root in ("protos", "common"):
        files = sorted(str(path.relative_to(ROOT / root)) for path in (ROOT / root).rglob("*.proto"))
        to = out / root
        to.mkdir(exist_ok=True)
        mypy = [f"--plugin={bin_folder / 'protoc-gen-mypy'}", f"--mypy_out=quiet:{to}", f"--python_out={to}"]
        grpc = [f"--plugin={bin_folder / 'protoc-gen-mypy_grpc'}", f"--mypy_grpc_out=quiet:{to}"]
        protoc = [sys.executable, "-m", "grpc_tools.protoc", *include]
        subprocess.run([*protoc, *mypy, *files], check=True)
        if services := [name for name in files if "\nservice " in (ROOT / root / name).read_text()]:
            subprocess.run([*protoc, *grpc, f"--grpc_python_out={to}", *services], check=True)
    _write_help(out / "protos/lineclear/v1/stats_help.py", [*protoc, "lineclear/v1/inference.proto"])


def _write_help(path: Path, protoc: list[str]) -> None:
    """Write the comments of the statistics as a table: stubs have none, and Prometheus shows them as help texts."""
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([*protoc, "--include_source_info", f"--descriptor_set_out={file.name}"], check=True)
        (schema,) = FileDescriptorSet.FromString(Path(file.name).read_bytes()).file
    comments = {
        tuple(place.path): " ".join(place.leading_comments.split()) for place in schema.source_code_info.location
    }
    lines = [
        f'    "{message.name}.{field.name}": {_quoted(comments[4, m, 2, f])},'
        for m, message in enumerate(schema.message_type)
        if message.name in STATS
        for f, field in enumerate(message.field)
    ]
    lines = [f"{line}  # noqa: E501" if len(line) > 120 else line for line in lines]
    title = '"""Comments of the statistics in inference.proto. Written by protos/generate.py; do not edit."""'
    path.write_text("\n".join([title, "", "HELP = {", *lines, "}", ""]), encoding="utf-8")


def _quoted(text: str) -> str:
    """Return `text` as a literal in the form that ruff keeps."""
    return repr(text) if '"' in text else f'"{text}"'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    generate(parser.parse_args().out)
