"""Test whether the time to the first token reveals another tenant's prompts: `python -m campaigns.privacy --help`.

python -m campaigns.privacy --trials 800                          a worker with constant step times
    python -m campaigns.privacy --trials 800 --model ../demo/model    the torch worker on a model

In each trial Alice sends a new prompt. Then Bob sends, at random, the same prompt or another new one. Last, Alice sends
hers again. Bob's two kinds of times must not be separable: the area under the ROC curve must be within 0.05 of one
half. As a control, Alice's repeated prompt must be faster than Bob's. Prints a line of JSON; exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from campaigns.server import Server, write_tokens
from support.small_tokenizers import byte_level, save

from lineclear.client import Client

MAX_AREA = 0.55
MIN_CONTROL_AREA = 0.9
_TOY = {"min_step_seconds": 0.002, "max_step_seconds": 0.002, "num_blocks": 2048}
_TOY_STEP_TOKENS = 32  # a prompt takes several steps, a cached prompt takes one
_LETTERS = 240
_WARM = 8


def area(lower: Sequence[float], higher: Sequence[float]) -> float:
    """Return the probability that one of `higher` is above one of `lower`; ties count half."""
    ordered = sorted(lower)
    above = sum(bisect_left(ordered, value) + bisect_right(ordered, value) for value in higher)
    return above / (2 * len(lower) * len(higher))


def separability(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the area for the better of the two guesses: 0.5 is inseparable, 1.0 is separable."""
    found = area(one, other)
    return max(found, 1 - found)


def campaign(folder: Path, *, trials: int, seed: int, model: str = "") -> dict[str, Any]:
    rng, target = random.Random(seed), f"unix:{folder}/api.sock"
    path, tokens = write_tokens(folder, ("alice", "bob"))
    server = _server(folder, target, path, model)
    times: dict[str, list[float]] = {"new": [], "shared": [], "own": []}
    try:
        server.wait_for("worker_joined")
        with Client(target, token=tokens["alice"]) as alice, Client(target, token=tokens["bob"]) as bob:
            for _ in range(_WARM):
                for client in (alice, bob):
                    _first_token_seconds(client, _text(rng))
            for _ in range(trials):
                secret = _text(rng)
                _first_token_seconds(alice, secret)
                kind = rng.choice(("new", "shared"))
                times[kind].append(_first_token_seconds(bob, secret if kind == "shared" else _text(rng)))
                times["own"].append(_first_token_seconds(alice, secret))
    finally:
        server.end()
    count = min(len(times["new"]), len(times["shared"]))
    return {
        "area": round(separability(times["new"], times["shared"]), 4),
        "area_by_chance": round(0.5 + math.sqrt((2 * count + 1) / (12 * count * count)), 4),  # one standard error
        "control_area": round(area(times["own"], times["new"]), 4),
        "trials": {kind: len(found) for kind, found in times.items()},
        "median_ms": {kind: round(1000 * median(found), 3) for kind, found in times.items()},
    }


def is_private(figures: dict[str, Any]) -> bool:
    """Whether Bob cannot separate his times and Alice can separate hers."""
    return bool(figures["area"] <= MAX_AREA and figures["control_area"] >= MIN_CONTROL_AREA)


def _server(folder: Path, target: str, token_file: Path, model: str) -> Server:
    flags = ["--token-file", str(token_file), "--model", model or str(save(folder, byte_level()))]
    if model:
        return Server(target, flags)
    return Server(target, [*flags, "--target-batch-tokens", str(_TOY_STEP_TOKENS)], toy=_TOY)


def _text(rng: random.Random) -> str:
    """Return random words, which the tokenizer's own cache does not contain."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))
    return " ".join(letters[begin : begin + 8] for begin in range(0, _LETTERS, 8))


def _first_token_seconds(client: Client, text: str) -> float:
    started_at = time.perf_counter()
    with client.stream(text, max_tokens=1, ignore_eos=True, temperature=0.0) as stream:
        for delta in stream:
            if delta.token_ids:
                return time.perf_counter() - started_at
    raise AssertionError("an answer without a token")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=800, help="about half of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="", help="a model directory: measure the torch worker")
    chosen = parser.parse_args(argv)
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        figures = campaign(Path(folder), **vars(chosen))
    seconds = round(time.monotonic() - started_at, 1)
    private = is_private(figures)
    print(json.dumps({"model": chosen.model, "seed": chosen.seed, "private": private, **figures, "seconds": seconds}))
    return 0 if private else 1


if __name__ == "__main__":
    sys.exit(main())
