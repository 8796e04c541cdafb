"""Write the Python stubs and their type stubs from the .proto files, in place.

    python protos/generate.py [--out FOLDER]

Run with the oldest supported grpcio-tools (pinned in the `dev` extra): stubs refuse runtimes older than their compiler.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    generate(parser.parse_args().out)
