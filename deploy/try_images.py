"""Build both images, and check that 16 streams complete while containers are killed, upgraded and stopped.

    python deploy/try_images.py [--builder podman|docker] [--previous COMMIT] [-- FLAGS OF THE BUILD]

One after the other: the worker's container is killed, the worker and the scheduler are replaced by those of a new tag,
both by those of another model, and both are stopped at once. Every answer must have the tokens that it has without.
With --previous the first containers are of the release at COMMIT, and both are replaced at once, back, and forth again.

Exits with 0 if neither podman nor docker works. Exits with 1 if a build fails, the product's layer exceeds 15 MB, an
answer is incomplete or another one, or a process exits with an error.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lineclear.client import Client, RetryPolicy
from lineclear.errors import LineclearError

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_STREAMS, NUM_TOKENS = 16, 400
READY_SECONDS = 180.0
MAX_PRODUCT_BYTES = 15_000_000
MODEL = REPOSITORY / "demo/model"
SCHEDULER, WORKER = "lineclear-try-scheduler", "lineclear-try-worker"
FLAGS = ["--model=/models/model", "--log-format=json", "--socket-directory=/run/lineclear/sockets"]
OWN_FLAGS = {
    SCHEDULER: ["--listen=unix:/api/api.sock", "--drain-timeout-seconds=180"],
    WORKER: ["--drain-timeout-seconds=190", "--deterministic"],
}
HARDENED = [
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "--user", "10001:10001", "--network", "none"),
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


def build(builder: str, flags: list[str], tree: Path = REPOSITORY, suffix: str = "") -> dict[str, str]:
    """Build both images of a tree and return their names without the suffix of the tag. Prints size and layers."""
    images = {}
    # Podman's own format has no health check.
    flags = [*(["--format", "docker"] if Path(builder).name == "podman" else []), *flags]
    for process in ("scheduler", "worker"):
        images[f"lineclear-try-{process}"] = f"lineclear-{process}:try"
        begin, image = time.monotonic(), f"lineclear-{process}:try{suffix}"
        run(builder, "build", *flags, "-t", image, "-f", str(tree / f"deploy/{process}.Dockerfile"), str(tree))
        size = int(run(builder, "image", "inspect", "--format", "{{.Size}}", image))
        print(f"{image}: {size / 1e6:.0f} MB, built in {time.monotonic() - begin:.0f} s")
        print(run(builder, "history", "--format", "  {{.Size}}  {{.CreatedBy}}", image))
        layers = run(builder, "history", "--format", "{{.Size}}", image).splitlines()
        product = next(size for size in map(bytes_of, layers) if size)
        print(f"  a change of the product replaces {product / 1e6:.1f} MB")
        if product > MAX_PRODUCT_BYTES and tree == REPOSITORY:
            sys.exit(f"images: the layer of the product exceeds {MAX_PRODUCT_BYTES / 1e6:.0f} MB")
    return images


def build_releases(builder: str, flags: list[str], previous: str | None, folder: Path) -> dict[str, str]:
    """Build the images of `previous`, or of this tree, and those of this tree with the suffix "-next"."""
    if previous is None:
        images = build(builder, flags)
        for image in images.values():
            run(builder, "tag", image, f"{image}-next")
        return images
    (tree := folder / "previous").mkdir()
    run("git", "-C", str(REPOSITORY), "archive", "--output", f"{tree}.tar", previous)
    run("tar", "-xf", f"{tree}.tar", "-C", str(tree))
    build(builder, flags, suffix="-next")
    return build(builder, flags, tree)


def bytes_of(size: str) -> float:
    """Convert a printed size to bytes: "11.9 MB" from podman, "11.9MB" from docker."""
    match = re.fullmatch(r"([0-9.]+) ?([kMG]?)B", size)
    assert match is not None, size
    return float(match[1]) * 1000 ** " kMG".index(match[2] or " ")


class Answer(NamedTuple):
    """The answer of a stream, how often the stream was cut, and its longest pause in seconds."""

    seed: int
    token_ids: tuple[int, ...]
    resumes: int
    pause: float


class Trial:
    """The containers of a scheduler and its workers, and streams whose every answer must be that of calm times."""

    def __init__(self, builder: str, images: dict[str, str], folder: Path) -> None:
        self.builder, self.images, self.folder = builder, images, folder
        self.containers: list[str] = []
        self.calm: set[tuple[int, tuple[int, ...]]] = set()  # seed and tokens

    def start(self, process: str, suffix: str = "", model: Path = MODEL) -> None:
        """Start a container from the image with this suffix of its tag."""
        self.containers.append(name := process + suffix)
        remove(self.builder, [name])  # left by an interrupted run
        mounts = ["-v", f"{self.folder}/sockets:/run/lineclear", "-v", f"{model}:/models/model:ro"]
        mounts += ["-v", f"{self.folder}/api:/api"] if process == SCHEDULER else []
        container = [*HARDENED, *mounts, self.images[process] + suffix, *FLAGS, *OWN_FLAGS[process]]
        run(self.builder, "run", "-d", "--name", name, *container)

    def stop(self, *names: str, kill: bool = False) -> None:
        """Stop containers at once, and check that each one ended as it should."""
        stop = ["kill"] if kill else ["stop", "--time", "200"]
        for process in [subprocess.Popen([self.builder, *stop, name], stdout=subprocess.DEVNULL) for name in names]:
            process.wait()
        codes = {name: int(run(self.builder, "wait", name)) for name in names}
        if set(codes.values()) != {137 if kill else 0}:
            sys.exit(f"images: a container failed: {codes}")

    def read(self, client: Client, *actions: Callable[[], None], once: bool = True) -> list[Answer]:
        """Perform actions while each stream reads one answer, or answer after answer, and return the answers."""
        started, done = threading.Barrier(NUM_STREAMS + 1, timeout=READY_SECONDS), threading.Event()

        def read_stream(seed: int) -> list[Answer]:
            answers: list[Answer] = []
            while not answers or not (once or done.is_set()):
                pause = 0.0
                with client.stream("Once upon a time", seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
                    next(stream)
                    if not answers:
                        started.wait()
                    last = time.monotonic()
                    for _ in stream:
                        pause, last = max(pause, time.monotonic() - last), time.monotonic()
                answers.append(Answer(seed, stream.result.token_ids, stream.result.resumes, pause))
            return answers

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            reading = [pool.submit(read_stream, seed) for seed in range(NUM_STREAMS)]
            try:
                started.wait()
                for action in actions:
                    action()
            finally:
                done.set()
            return [answer for stream in reading for answer in stream.result()]

    def check(self, event: str, answers: list[Answer]) -> None:
        """Describe the answers read during an event. Exits if one is not that of calm times."""
        expected = {calm for calm in self.calm if len(calm[1]) == NUM_TOKENS}
        right = sum(answer[:2] in expected and not answer.resumes for answer in answers)
        pause = max(answer.pause for answer in answers)
        print(f"{event}: {right} of {len(answers)} answers are right and were not cut, longest pause {pause:.1f} s")
        if right < len(answers):
            sys.exit("images: an answer is incomplete or another one, or its stream was cut")


def try_out(trial: Trial, *, two_releases: bool) -> None:
    """Kill, replace and stop the containers under streams."""
    for directory in (trial.folder / "sockets", trial.folder / "api"):
        directory.mkdir()
        directory.chmod(0o777)
    other = shutil.copytree(MODEL, trial.folder / "other") / "config.json"  # another model with the same tokenizer
    other.write_text(other.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))

    def start(*processes: str, **more: Any) -> None:
        begin = time.monotonic()
        for process in processes:
            trial.start(process, **more)
        wait_until(lambda: [worker.state for worker in client.stats().workers] == ["joined"])
        print(f"ready {time.monotonic() - begin:.1f} s after the start of {' and '.join(processes)}")

    def replace_worker() -> None:
        trial.start(WORKER, "-next")
        wait_until(lambda: [worker.state for worker in client.stats().workers] == ["joined"] * 2)
        trial.stop(WORKER)

    def replace_both(event: str, old: str, new: str, **more: Any) -> int:
        """Return how many of the answers differ from those before."""
        stop = partial(trial.stop, SCHEDULER + old, WORKER + old)
        answers = trial.read(client, stop, partial(start, SCHEDULER, WORKER, suffix=new, **more), once=False)
        changed = {answer[:2] for answer in trial.read(client)} - trial.calm
        trial.calm |= changed
        trial.check(event, answers)
        return len(changed)

    retry = RetryPolicy(resume_timeout_seconds=READY_SECONDS)
    with Client(f"unix:{trial.folder}/api/api.sock", retry=retry) as client:
        start(SCHEDULER, WORKER)
        trial.calm = {answer[:2] for answer in trial.read(client)}
        kill, stop = partial(trial.stop, WORKER, kill=True), partial(trial.stop, SCHEDULER)
        trial.check("worker killed", trial.read(client, kill, partial(start, WORKER), once=False))
        if two_releases:
            print(f"{replace_both('release upgraded', '', '-next')} of {NUM_STREAMS} answers of the releases differ")
            replace_both("release rolled back", "-next", "")
        else:
            trial.check("worker upgraded", trial.read(client, replace_worker, once=False))
            upgrade = partial(start, SCHEDULER, suffix="-next")
            trial.check("scheduler upgraded", trial.read(client, stop, upgrade, once=False))
        if replace_both("model upgraded", "" if two_releases else "-next", "-next", model=other.parent) < NUM_STREAMS:
            sys.exit("images: the models do not differ")
        trial.check("both stopped", trial.read(client, partial(trial.stop, f"{SCHEDULER}-next", f"{WORKER}-next")))


def remove(builder: str, containers: Iterable[str]) -> None:
    """Stop and remove the containers that exist."""
    for name in containers:
        subprocess.run([builder, "rm", "--force", name], capture_output=True)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds. Exits after READY_SECONDS."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except LineclearError:
            pass
        time.sleep(0.2)
    sys.exit(f"not ready after {READY_SECONDS:g} s")


def main() -> None:
    """Build and test the images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--builder", help="podman or docker; default: the first of them that works")
    parser.add_argument("--previous", metavar="COMMIT", help="upgrade from the images of this commit")
    parser.add_argument("flags", nargs="*", help="additional flags of the build")
    arguments = parser.parse_args()
    builder = find_builder([arguments.builder] if arguments.builder else ("podman", "docker"))
    if builder is None and arguments.builder:
        sys.exit(f"images: {arguments.builder} does not work on this machine; run `{arguments.builder} info`")
    if builder is None:
        print("images: skipped, neither podman nor docker works on this machine")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="lineclear-", dir="/tmp") as folder:
            images = build_releases(builder, arguments.flags, arguments.previous, Path(folder))
            trial = Trial(builder, images, Path(folder))
            try:
                try_out(trial, two_releases=arguments.previous is not None)
            except BaseException:
                for name in trial.containers:
                    print(f"--- log of {name}", flush=True)
                    subprocess.run([builder, "logs", "--tail", "20", name], stderr=subprocess.STDOUT)
                raise
            finally:
                remove(builder, trial.containers)
    except subprocess.CalledProcessError as error:
        sys.exit(f"images: `{builder} {error.cmd[1]}` failed with {error.returncode}; its output is above")


if __name__ == "__main__":
    main()
