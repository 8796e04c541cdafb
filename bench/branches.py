"""Measures several outputs and beams of one request against single requests.

    python -m bench.branches --model DIR [--outputs 8] [--prompt-tokens 1024] [--tokens 64] [--beams 4]

Through the whole service, one request at a time, each with a prompt of its own so that nothing is cached: one request,
one request with `n` outputs, and as many single requests at once. Positions come from `Counters.step_tokens`. With one
token, the outputs compute the prompt, and each the rest of its block.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.figures import Figure, arguments, main
from bench.lineclear_serve import Service, serving
from bench.measure import median

_ROUNDS = 5
_BEAM_PROMPT, _BEAM_TOKENS = 32, 32
_BLOCK = 16


class Run(NamedTuple):
    """Seconds and computed positions of a round."""

    seconds: float
    positions: int


class Asker:
    """Sends requests with new prompts to one service."""

    def __init__(self, service: Service) -> None:
        self._client = service.client
        self._number = 0

    async def run(self, prompt_tokens: int, count: int = 1, **params: Any) -> Run:
        """Send `count` requests of one new prompt at once, and wait for all answers."""
        self._number += 1
        prompt = [10 + self._number, *(5 + (i * 7 + self._number) % 3000 for i in range(prompt_tokens - 1))]
        before = (await self._client.stats()).counters.step_tokens
        begin = time.perf_counter()
        await asyncio.gather(*(self._client.generate(prompt, ignore_eos=True, seed=i, **params) for i in range(count)))
        seconds = time.perf_counter() - begin
        return Run(seconds, (await self._client.stats()).counters.step_tokens - before)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure each case in turns."""
    outputs, length = options.outputs, options.prompt_tokens
    cases: dict[str, dict[str, Any]] = {
        "one request": {"max_tokens": options.tokens},
        f"n = {outputs}": {"max_tokens": options.tokens, "n": outputs},
        f"{outputs} requests": {"max_tokens": options.tokens, "count": outputs},
        f"n = {outputs}, one token": {"max_tokens": 1, "n": outputs},
        f"best_of = {outputs}": {"max_tokens": options.tokens, "best_of": outputs},
    }
    beams = {"max_tokens": _BEAM_TOKENS, "num_beams": options.beams}

    async def measured() -> dict[str, list[Run]]:
        async with serving(str(options.model)) as service:
            asker = Asker(service)
            found: dict[str, list[Run]] = {name: [] for name in (*cases, "beams", "greedy")}
            for number in range(_ROUNDS + 1):
                runs = {name: await asker.run(length, **params) for name, params in cases.items()}
                runs["beams"] = await asker.run(_BEAM_PROMPT, **beams)
                runs["greedy"] = await asker.run(_BEAM_PROMPT, max_tokens=_BEAM_TOKENS, temperature=0.0)
                for name, run in runs.items() if number else ():  # the first round warms up
                    found[name].append(run)
            return found

    found = asyncio.run(measured())
    where = f"{options.model.resolve().name}, prompt of {length}, {options.tokens} tokens"
    one = median([run.seconds for run in found["one request"]])
    for name in cases:
        seconds = median([run.seconds for run in found[name]])
        case = f"{where}, {name}"
        yield Figure("branches: time", case, seconds * 1e3, "ms")
        yield Figure("branches: of one request", case, seconds / one, "times")
        is_prompt = name.endswith("one token")
        goal = length + outputs * _BLOCK if is_prompt else None
        yield Figure("branches: positions computed", case, max(run.positions for run in found[name]), "", goal)
    where = f"{options.model.resolve().name}, prompt of {_BEAM_PROMPT}, {_BEAM_TOKENS} tokens"
    for name, case in (("beams", f"{options.beams} beams"), ("greedy", "greedy")):
        seconds = median([run.seconds for run in found[name]])
        yield Figure("branches: time for a token", f"{where}, {case}", seconds * 1e3 / _BEAM_TOKENS, "ms")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--outputs", type=int, default=8)
    found.add_argument("--prompt-tokens", type=int, default=1024)
    found.add_argument("--tokens", type=int, default=64)
    found.add_argument("--beams", type=int, default=4)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
