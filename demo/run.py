"""Compares continuous with static batching: six prompts of different lengths through three slots.

    python demo/run.py [--model DIR] [--slots N] [--images DIR]

Starts a `LocalServer`, sends all prompts at once over gRPC and prints the tokens as they arrive. Then runs the prompts
with static batching, in two ways: the same service with fixed batches, and transformers' `generate` on padded waves.
Prints who enters which slot at which step, the attention mask of a step, and the comparison; writes timeline and mask
as SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import runs
import story
from runs import Run

from lineclear.client import AsyncAdminClient, AsyncClient, Generation, LocalServer, ServerStartError
from lineclear.extras import lineclear_command
from lineclear.v1 import steps_pb2

PROMPTS = (
    ("The capital of France is", 6),
    ("Today's weather is so", 50),
    ("In machine learning, a transformer is", 300),
    ("Once upon a time in a land far away,", 30),
    ("Quantum computing differs from classical computing because", 180),
    ("The history of the Roman Empire began", 45),
)
CONTINUOUS = ("continuous (lineclear)", "Continuous batching, lineclear")
STATIC = ("static (lineclear, fixed_size)", "Static batching without padding, lineclear's fixed_size")
PADDED = ("static, padded (transformers generate)", "Static batching in padded waves, generate of transformers")
HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
COLOURS = (36, 33, 32, 35, 34, 31)


def server(model: str, slots: int, strategy: str, threads: int, admin: str) -> LocalServer:
    """Start a local service in float32, so that each way gives the same tokens. `admin`: its admin address."""
    flags = ["--model", model, "--max-batch-size", str(slots), "--batching-strategy", strategy]
    flags += ["--admin-listen", admin, "--step-history", "4096"]
    worker = ["--", "--dtype", "float32", "--threads", str(threads)]
    return LocalServer(*flags, *worker, start_timeout_seconds=START_SECONDS)


class Printer:
    """Prints concurrent streams, each line with the number of its prompt."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._held = [""] * len(PROMPTS)

    def add(self, index: int, text: str) -> None:
        """Add text of an answer; prints complete lines."""
        self._held[index] += text
        if len(self._held[index]) >= 64:
            self.flush(index)

    def flush(self, index: int) -> None:
        """Print the rest of an answer."""
        if self._held[index]:
            self.say(index, self._held[index].replace("\n", " "))
            self._held[index] = ""

    def say(self, index: int, line: str) -> None:
        """Print one line about a prompt."""
        label = f"[{index + 1}]"
        print(f"\033[{COLOURS[index % len(COLOURS)]}m{label}\033[0m {line}" if self._colour else f"{label} {line}")
        sys.stdout.flush()


async def stream_one(client: AsyncClient, index: int, printer: Printer | None) -> Generation:
    prompt, max_tokens = PROMPTS[index]
    async with client.stream(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as stream:
        async for delta in stream:
            if printer is not None:
                if delta.started is not None:
                    printer.say(index, f"-> slot {delta.started.slot}, step {delta.started.first_step}: «{prompt}»")
                printer.add(index, delta.text)
    if printer is not None:
        printer.flush(index)
        printer.say(index, f"<- done at step {stream.result.timings.last_step}")
    return stream.result


async def executed_steps(admin: str) -> tuple[steps_pb2.StepRecord, ...]:
    """Return the steps that the service keeps."""
    async with AsyncClient(admin) as client, aclosing(AsyncAdminClient(client).watch_steps(history=4096)) as watched:
        return tuple((await anext(watched)).steps)


async def run(target: str, admin: str, printer: Printer) -> Run:
    """Send all prompts at once."""
    async with AsyncClient(target) as client:
        await client.generate(PROMPTS[0][0], max_tokens=2)  # triggers one-time initialisation
        begin = time.monotonic()
        answers = await asyncio.gather(*(stream_one(client, i, printer) for i in range(len(PROMPTS))))
        seconds = time.monotonic() - begin
    return runs.of_answers(*CONTINUOUS, answers, seconds, await executed_steps(admin), static=False)


async def run_static(target: str, admin: str, slots: int) -> Run:
    """Send the prompts in order; the service waits for a full batch and runs it to its end."""
    async with AsyncClient(target) as client:
        await asyncio.gather(*(client.generate(PROMPTS[0][0], max_tokens=2) for _ in range(slots)))
        begin = time.monotonic()
        tasks = []
        for index in range(len(PROMPTS)):
            tasks.append(asyncio.create_task(stream_one(client, index, None)))
            await asyncio.sleep(0.005)  # keeps the order in the queue
        answers = await asyncio.gather(*tasks)
        seconds = time.monotonic() - begin
    return runs.of_answers(*STATIC, answers, seconds, await executed_steps(admin), static=True)


class PaddedWaves:
    """The process of `padded_waves`. It loads while a service starts, and waits for `run`."""

    def __init__(self, model: str, slots: int, threads: int) -> None:
        self._slots = slots
        script = str(Path(__file__).with_name("padded_waves.py"))
        arguments = ["--model", model, "--slots", str(slots), "--threads", str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_until_loaded(self) -> None:
        """Wait for the model, and for the process to become idle."""
        self._version = self._read()["version"]

    def run(self) -> Run:
        """Run all prompts in waves."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": PROMPTS}) + "\n")
        self._process.stdin.flush()
        found = self._read()
        name, what = PADDED
        return runs.of_waves(name, f"{what} {self._version}", found["waves"], found["seconds"], self._slots)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"transformers ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def report(all_runs: Sequence[Run], images: Path) -> bool:
    """Print the story. Return whether all ways gave the same tokens."""
    print("\nAdmission log: who enters which slot at which step")
    for one in all_runs:
        print("\n".join(story.admission_log(one)))
    print(f"\n{story.mask(all_runs[0], shutil.get_terminal_size((100, 24)).columns)}")
    count, first = len(PROMPTS), all_runs[0]
    print(f"Same {count} prompts, model, machine and threads; {first.slots} slots, {first.tokens} output tokens")
    print("\n".join(story.comparison(all_runs)))
    same = story.tokens_are_equal(all_runs)
    print(f"\nThe {len(all_runs)} outputs are {'equal' if same else 'NOT EQUAL'}, token for token.")
    images.mkdir(parents=True, exist_ok=True)
    for name, svg in story.pictures(all_runs).items():
        (images / name).write_text(svg, encoding="utf-8")
    print(f"Pictures: {images / 'timeline.svg'} and mask.svg")
    print("\nWhere to go next")
    program = lineclear_command()
    lines = [*((f"{program} {command}", what) for command, what in story.NEXT), story.PAGE]
    width = max(len(command) for command, _ in lines)
    for command, what in lines:
        print(f"  {command:{width}}  {what}")
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all ways; return 0 if they gave the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=HERE / "model", help="a model directory; the demo model by default"
    )
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of each way; 0: its own choice")
    parser.add_argument(
        "--images", type=Path, default=HERE.parent / "build" / "demo", help="where to write the pictures"
    )
    options = parser.parse_args(arguments)
    model, slots, threads = str(options.model.resolve()), options.slots, options.threads
    print(f"Starting the service: continuous batching, {slots} slots")
    try:
        # One event loop for both: gRPC may still use the first one after its work is done.
        with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="lineclear-demo-") as folder:
            admin = f"unix:{folder}/admin.sock"
            with server(model, slots, "continuous", threads, admin) as service:
                continuous = runner.run(run(service.target, admin, Printer()))
            print("\nThe same prompts with static batching: fixed batches in the service, then transformers' generate")
            with PaddedWaves(model, slots, threads) as waves:
                with server(model, slots, "fixed_size", threads, admin) as service:
                    waves.wait_until_loaded()
                    static = runner.run(run_static(service.target, admin, slots))
                padded = waves.run()
    except ServerStartError as error:
        raise SystemExit(str(error)) from None
    return 0 if report((continuous, static, padded), options.images) else 1


if __name__ == "__main__":
    sys.exit(main())
