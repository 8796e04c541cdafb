"""Build both images, and check that 16 streams complete when both containers are stopped at once.

    python deploy/try_images.py [--builder podman|docker] [-- FLAGS OF THE BUILD]

Exits with 0 if neither podman nor docker works. Exits with 1 if a build fails, the product's layer exceeds 20 MB, a
stream is incomplete, or a process exits with an error.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lineclear.client import Client, Generation, HealthStatus
from lineclear.errors import LineclearError

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_STREAMS, NUM_TOKENS = 16, 400
READY_SECONDS = 180.0
MAX_PRODUCT_BYTES = 20_000_000
HARDENED = [
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--user", "10001:10001"),
    "--no-healthcheck",  # podman needs systemd for it
]


def find_builder(names: Sequence[str] = ("podman", "docker")) -> str | None:
    """Return the first builder that works on this machine."""
    for name in names:
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True).returncode:
            return name
    return None


def run(*command: str) -> str:
    """Run a command and return its output. Raises CalledProcessError."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def build(builder: str, flags: list[str]) -> dict[str, str]:
    """Build both images and return their names. Prints size and layers."""
    images = {}
    # Podman's own format has no health check.
    flags = [*(["--format", "docker"] if Path(builder).name == "podman" else []), *flags]
    for process in ("scheduler", "worker"):
        images[process] = image = f"lineclear-{process}:try"
        begin = time.monotonic()
        file = str(REPOSITORY / f"deploy/{process}.Dockerfile")
        run(builder, "build", *flags, "-t", image, "-f", file, str(REPOSITORY))
        size = int(run(builder, "image", "inspect", "--format", "{{.Size}}", image))
        print(f"{image}: {size / 1e6:.0f} MB, built in {time.monotonic() - begin:.0f} s")
        print(run(builder, "history", "--format", "  {{.Size}}  {{.CreatedBy}}", image))
        layers = run(builder, "history", "--format", "{{.Size}}", image).splitlines()
        product = next(size for size in map(bytes_of, layers) if size)
        print(f"  a change of the product replaces {product / 1e6:.1f} MB")
        if product > MAX_PRODUCT_BYTES:
            sys.exit(f"images: the layer of the product exceeds {MAX_PRODUCT_BYTES / 1e6:.0f} MB")
    return images


def bytes_of(size: str) -> float:
    """Convert a printed size to bytes: "11.9 MB" from podman, "11.9MB" from docker."""
    match = re.fullmatch(r"([0-9.]+) ?([kMG]?)B", size)
    assert match is not None, size
    return float(match[1]) * 1000 ** " kMG".index(match[2] or " ")


def try_out(builder: str, images: dict[str, str], folder: Path) -> None:
    """Start both containers, stop them at once under streams, and check that every stream completes."""
    sockets, api, model = folder / "sockets", folder / "api", REPOSITORY / "demo/model"
    for directory in (sockets, api):
        directory.mkdir()
        directory.chmod(0o777)
    shared = [*HARDENED, "--network", "none", "-v", f"{sockets}:/run/lineclear", "-v", f"{model}:/models/model:ro"]
    common = ["--model=/models/model", "--log-format=json"]
    containers = {name: f"lineclear-try-{name}" for name in images}
    listen = ["--listen=unix:/api/api.sock", "--socket-directory=/run/lineclear/sockets", "--drain-timeout-seconds=60"]
    remove(builder, containers.values())  # left by an interrupted run
    begin = time.monotonic()
    scheduler = ["-v", f"{api}:/api", images["scheduler"], *common, *listen]
    worker = [images["worker"], *common, "--socket-directory=/run/lineclear/sockets", "--drain-timeout-seconds=70"]
    try:
        run(builder, "run", "-d", "--name", containers["scheduler"], *shared, *scheduler)
        run(builder, "run", "-d", "--name", containers["worker"], *shared, *worker)
        with Client(f"unix:{api}/api.sock", max_attempts=1) as client:
            wait_until_ready(client)
            print(f"ready after {time.monotonic() - begin:.1f} s")
            answers = stream_while_stopping(client, [builder, "stop", "--time", "90", *containers.values()])
        complete = sum(len(answer.token_ids) == NUM_TOKENS and not answer.resumes for answer in answers)
        codes = [run(builder, "inspect", "--format", "{{.State.ExitCode}}", name) for name in containers.values()]
        print(f"{complete} of {NUM_STREAMS} streams complete, exit codes {codes}")
        if complete < NUM_STREAMS or set(codes) != {"0"}:
            sys.exit("images: a stream is incomplete or a container failed")
    except BaseException:
        for name in containers.values():
            print(f"--- log of {name}", flush=True)
            subprocess.run([builder, "logs", "--tail", "20", name], stderr=subprocess.STDOUT)
        raise
    finally:
        remove(builder, containers.values())


def remove(builder: str, containers: Iterable[str]) -> None:
    """Stop and remove the containers that exist."""
    for name in containers:
        subprocess.run([builder, "rm", "--force", name], capture_output=True)


def wait_until_ready(client: Client) -> None:
    """Wait until the server is ready. Exits after READY_SECONDS."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if client.health(timeout_seconds=1.0) is HealthStatus.SERVING:
                return
        except LineclearError:
            pass
        if time.monotonic() > deadline:
            sys.exit(f"not ready after {READY_SECONDS:g} s")
        time.sleep(0.2)


def stream_while_stopping(client: Client, stop: list[str]) -> list[Generation]:
    """Stop both containers after every stream has started, and return the results of the streams."""
    started = threading.Barrier(NUM_STREAMS + 1, timeout=READY_SECONDS)

    def read(seed: int) -> Generation:
        with client.stream("Once upon a time", seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
            next(stream)
            started.wait()
            for _ in stream:
                pass
        return stream.result

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(read, seed) for seed in range(NUM_STREAMS)]
        started.wait()
        stopping = [subprocess.Popen([*stop[:4], name], stdout=subprocess.DEVNULL) for name in stop[4:]]
        results = [answer.result() for answer in answers]
    for process in stopping:
        process.wait()
    return results


def main() -> None:
    """Build and test the images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--builder", help="podman or docker; default: the first of them that works")
    parser.add_argument("flags", nargs="*", help="additional flags of the build")
    arguments = parser.parse_args()
    builder = find_builder([arguments.builder] if arguments.builder else ("podman", "docker"))
    if builder is None and arguments.builder:
        sys.exit(f"images: {arguments.builder} does not work on this machine; run `{arguments.builder} info`")
    if builder is None:
        print("images: skipped, neither podman nor docker works on this machine")
        return
    try:
        images = build(builder, arguments.flags)
        with tempfile.TemporaryDirectory(prefix="lineclear-", dir="/tmp") as folder:
            try_out(builder, images, Path(folder))
    except subprocess.CalledProcessError as error:
        sys.exit(f"images: `{builder} {error.cmd[1]}` failed with {error.returncode}; its output is above")


if __name__ == "__main__":
    main()
