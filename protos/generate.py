"""Writes the Python stubs and their type stubs from the .proto files, in place.

    python protos/generate.py [--out FOLDER]

Run with the oldest grpcio-tools we support (pinned in the `dev` extra): stubs refuse runtimes older than their maker.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTOS = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.proto"))


def generate(out: Path) -> None:
    """Compile every .proto below this folder into `out`, which keeps the package layout. Raises CalledProcessError."""
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    grpc_plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    public = [p for p in PROTOS if not p.startswith("lineclear/wire/")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
    mypy = [f"--plugin=protoc-gen-mypy={plugin}", f"--mypy_out=quiet:{out}"]
    subprocess.run([*protoc, f"--python_out={out}", *mypy, *PROTOS], check=True)
    services = [p for p in public if p.endswith(("admin.proto", "inference.proto"))]
    mypy_grpc = [f"--plugin=protoc-gen-mypy_grpc={grpc_plugin}", f"--mypy_grpc_out=quiet:{out}"]
    subprocess.run([*protoc, f"--grpc_python_out={out}", *mypy_grpc, *services], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    generate(parser.parse_args().out)
