"""Arrivals of a simulation: a file of requests, or a Poisson process with lengths from distributions."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Length = Callable[[random.Random], int]


class Arrival(NamedTuple):
    """One request. Requests of one `group` share their first `prefix_tokens` prompt tokens.

    With `max_tokens` above `output_tokens` the answer ends with a stop token, which the scheduler does not know before.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 128
    group: str = ""
    prefix_tokens: int = 0
    max_tokens: int = 0


class BadArrivals(Exception):
    """The arrivals cannot be read; the message says where."""


@dataclass(frozen=True, slots=True)
class PoissonTraffic:
    """Requests with independent gaps, or all at once at an infinite rate. The same seed gives the same lengths at each
    rate.
    """

    num_requests: int
    prompt_tokens: Length
    output_tokens: Length
    num_groups: int = 0
    prefix_tokens: int = 0
    seed: int = 0

    def at(self, rate: float) -> Iterator[Arrival]:
        """Yield the arrivals at `rate` requests a second."""
        gaps, lengths = random.Random(f"gaps {self.seed}"), random.Random(f"lengths {self.seed}")
        now = 0.0
        for _ in range(self.num_requests):
            prompt, output = self.prompt_tokens(lengths), self.output_tokens(lengths)
            group = str(lengths.randrange(self.num_groups)) if self.num_groups else ""
            prefix = self.prefix_tokens if group else 0
            yield Arrival(now, prefix + prompt, output, group=group, prefix_tokens=prefix)
            now += gaps.expovariate(rate) if math.isfinite(rate) else 0.0


def parse_length(text: str) -> Length:
    """Return the distribution that `text` names. Raises ValueError.

    N; uniform:LOW:HIGH; exponential:MEAN; lognormal:MEDIAN:SIGMA. Lengths are at least 1.
    """
    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
        if not numbers:
            constant = int(name)
            if constant < 1:
                raise ValueError
            return lambda chance: constant
        if name == "uniform" and len(values) == 2 and 1 <= values[0] <= values[1]:
            low, high = map(int, values)
            return lambda chance: chance.randint(low, high)
        if name == "exponential" and len(values) == 1 and values[0] > 0:
            return lambda chance: max(1, round(chance.expovariate(1 / values[0])))
        if name == "lognormal" and len(values) == 2 and values[0] > 0 <= values[1]:
            return lambda chance: max(1, round(chance.lognormvariate(math.log(values[0]), values[1])))
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no length; give N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA")


def read(path: Path) -> list[Arrival]:
    """Return the arrivals of a CSV file with a header, or of a file of JSON objects, one a line, by time.

    Columns: arrival (seconds), prompt_tokens, output_tokens, and any of tenant, priority, group, prefix_tokens,
    max_tokens. Raises BadArrivals.
    """
    found = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.read(1)
            file.seek(0)
            entries: Iterator[dict[str, Any]] = map(json.loads, file) if first == "{" else csv.DictReader(file)
            for line, entry in enumerate(entries, 1 if first == "{" else 2):
                try:
                    found.append(_arrival(entry))
                except (KeyError, TypeError, ValueError) as error:
                    raise BadArrivals(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    except (OSError, ValueError) as error:
        raise BadArrivals(f"{path}: {error}") from None
    if not found:
        raise BadArrivals(f"{path}: no requests; give a header arrival,prompt_tokens,output_tokens and rows")
    return sorted(found, key=lambda arrival: arrival.at)


def _arrival(entry: dict[str, Any]) -> Arrival:
    arrival = Arrival(
        float(entry["arrival"]),
        int(entry["prompt_tokens"]),
        int(entry["output_tokens"]),
        str(entry.get("tenant") or ""),
        int(entry.get("priority") or 128),
        str(entry.get("group") or ""),
        int(entry.get("prefix_tokens") or 0),
        int(entry.get("max_tokens") or 0),
    )
    if not (0 <= arrival.at < math.inf and arrival.prompt_tokens > 0 and arrival.output_tokens > 0):
        raise ValueError("arrival is at least 0, prompt_tokens and output_tokens at least 1")
    if not 0 <= arrival.priority <= 255:
        raise ValueError(f"priority is {arrival.priority}; give 0 to 255")
    if not 0 <= arrival.prefix_tokens <= arrival.prompt_tokens:
        raise ValueError(f"prefix_tokens is {arrival.prefix_tokens} of {arrival.prompt_tokens} prompt tokens")
    return arrival


def scaled(arrivals: list[Arrival], rate: float) -> Iterator[Arrival]:
    """Yield the arrivals, with all times stretched to `rate` requests a second."""
    own = rate_of(arrivals)
    factor = own / rate if math.isfinite(own) and math.isfinite(rate) else 0.0
    return (arrival._replace(at=arrival.at * factor) for arrival in arrivals)


def rate_of(arrivals: list[Arrival]) -> float:
    """Return the mean number of requests a second."""
    span = arrivals[-1].at - arrivals[0].at
    return (len(arrivals) - 1) / span if span > 0 else math.inf
