"""Compares continuous with static batching: six prompts of different lengths through three slots.

    python demo/run.py [--model DIR] [--slots N]

Starts a `LocalServer`, sends all prompts at once over gRPC and prints the tokens as they arrive, then the admission
log. Then runs the prompts again with static batching: same service, model and slots, but a batch starts together and no
request joins it until its longest answer is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lineclear.client import AsyncClient, Generation, LocalServer, ServerStartError

PROMPTS = (
    ("The capital of France is", 6),
    ("Today's weather is so", 50),
    ("In machine learning, a transformer is", 300),
    ("Once upon a time in a land far away,", 30),
    ("Quantum computing differs from classical computing because", 180),
    ("The history of the Roman Empire began", 45),
)
START_SECONDS = 120.0
COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class Run:
    """Results of one pass over the prompts."""

    answers: tuple[Generation, ...]
    seconds: float

    @property
    def steps(self) -> int:
        """Seconds from the first step with a prompt to the last token."""
        return max(a.timings.last_step for a in self.answers) - min(a.started.first_step for a in self.answers) + 1


def server(model: str, slots: int, strategy: str) -> LocalServer:
    """Start a local service."""
    which = ["--model", model] if model else ["--demo"]
    how = ["--max-batch-size", str(slots), "--batching-strategy", strategy]
    # Worker settings: float32, so that both ways give the same tokens.
    exact = ["--", "--dtype", "float32"]
    return LocalServer(*which, *how, *exact, start_timeout_seconds=START_SECONDS)


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


async def run(target: str, printer: Printer | None) -> Run:
    """Run all prompts at once through a service."""
    async with AsyncClient(target) as client:
        await client.generate(PROMPTS[0][0], max_tokens=2)  # triggers one-time initialisation
        begin = time.monotonic()
        answers = await asyncio.gather(*(stream_one(client, i, printer) for i in range(len(PROMPTS))))
        return Run(tuple(answers), time.monotonic() - begin)


async def run_static(target: str, slots: int) -> Run:
    """Run the prompts in order, in batches of `slots`; the service waits for a full batch."""
    async with AsyncClient(target) as client:
        await asyncio.gather(*(client.generate(PROMPTS[0][0], max_tokens=2) for _ in range(slots)))
        begin = time.monotonic()
        tasks = []
        for index in range(len(PROMPTS)):
            tasks.append(asyncio.create_task(stream_one(client, index, None)))
            await asyncio.sleep(0.005)  # keeps the order in the queue
        return Run(tuple(await asyncio.gather(*tasks)), time.monotonic() - begin)


def padding(slots: int) -> int:
    """Return the rows that padded static batches compute after the end of an answer."""
    lengths = [max_tokens for _, max_tokens in PROMPTS]
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    return sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def report(continuous: Run, static: Run, slots: int) -> bool:
    """Print the admission log and the comparison. Returns whether both gave the same tokens."""
    print("\nAdmission log (continuous batching)")
    print("  request  slot  from step  to step  tokens  queued s")
    in_order = sorted(
        enumerate(continuous.answers), key=lambda item: (item[1].started.first_step, item[1].started.slot)
    )
    for index, a in in_order:
        print(
            f"  [{index + 1}]      {a.started.slot:4}  {a.started.first_step:9}  {a.timings.last_step:7}"
            f"  {a.usage.completion_tokens:6}  {a.timings.queue_time_seconds:8.3f}"
        )
    tokens = sum(a.usage.completion_tokens for a in continuous.answers)
    same = [a.token_ids for a in continuous.answers] == [a.token_ids for a in static.answers]
    print(f"\nSame {len(PROMPTS)} prompts, same model, {slots} slots, {tokens} output tokens")
    print("               steps  padded tokens  seconds  tokens/s")
    for name, result, padded in (("continuous", continuous, 0), ("static", static, padding(slots))):
        rate = tokens / result.seconds
        print(f"  {name:11} {result.steps:6}  {padded:13}  {result.seconds:7.2f}  {rate:8.1f}")
    steps, seconds = static.steps / continuous.steps, static.seconds / continuous.seconds
    print(f"  ratio       {steps:6.2f}                 {seconds:7.2f}")
    print(f"\nBoth outputs are {'equal' if same else 'NOT EQUAL'}, token for token.")
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both ways; return 0 if they gave the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a model directory; the bundled demo model by default")
    parser.add_argument("--slots", type=int, default=3)
    options = parser.parse_args(arguments)
    model = str(Path(options.model).resolve()) if options.model else ""
    print(f"Starting the service: continuous batching, {options.slots} slots")
    try:
        # One event loop for both: gRPC may still use the first one after its work is done.
        with asyncio.Runner() as runner:
            with server(model, options.slots, "continuous") as service:
                continuous = runner.run(run(service.target, Printer()))
            print("\nStarting the service again: static batching, for comparison")
            with server(model, options.slots, "fixed_size") as service:
                static = runner.run(run_static(service.target, options.slots))
    except ServerStartError as error:
        raise SystemExit(str(error)) from None
    return 0 if report(continuous, static, options.slots) else 1


if __name__ == "__main__":
    sys.exit(main())
