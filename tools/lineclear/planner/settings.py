"""Settings of `lineclear simulate`: those of the scheduler, and the traffic and workers to simulate."""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from lineclear.planner.arrivals import parse_length
from lineclear.process.setting_fields import Group
from lineclear.scheduler import settings_fields
from lineclear.scheduler.settings import SchedulerSettings

TRAFFIC = Group("Traffic")
WORKERS = Group("Workers")
OUTPUT = Group("Output")


class SimulationSettings(SchedulerSettings):
    """Settings of lineclear simulate, which predicts a server's latency and throughput on a virtual clock.

    The scheduler's settings hold as in a server, from flags, environment and --config. `lineclear simulate fit FILE`
    fits the model of steps alone.
    """

    program: ClassVar[str] = "lineclear simulate"
    shown_groups: ClassVar[tuple[str, ...]] = (
        *(TRAFFIC.title, WORKERS.title, OUTPUT.title),
        *(settings_fields.BATCHING.title, settings_fields.REQUESTS.title, settings_fields.LOGS.title),
    )

    arrivals: str = TRAFFIC.field("poisson")
    """File of requests, or poisson. A file is CSV with a header, or a JSON object a line: arrival (seconds),
    prompt_tokens, output_tokens, and any of tenant, priority, group, prefix_tokens, max_tokens. max_tokens above
    output_tokens means that the answer ends with a stop token."""
    rate: str = TRAFFIC.field("")
    """Requests a second, several separated by commas; inf: all at once. Empty: those of the file."""
    num_requests: int = TRAFFIC.field(1000, ge=1, le=10_000_000)
    """Requests of poisson."""
    prompt_tokens: str = TRAFFIC.field("128")
    """Prompt length of poisson. N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA."""
    output_tokens: str = TRAFFIC.field("128")
    """Answer length of poisson, as prompt_tokens."""
    shared_prefix_groups: int = TRAFFIC.field(0, ge=0, le=1_000_000)
    """Groups of poisson requests with a common prefix; 0: none. Each request is in a random one."""
    shared_prefix_tokens: int = TRAFFIC.field(0, ge=0, le=1_000_000)
    """Tokens of the common prefix, before those of prompt_tokens."""
    seed: int = TRAFFIC.field(0, ge=0, le=2**63)
    """Seed of arrivals, lengths and step times."""

    model_of_steps: str = WORKERS.field("")
    """File with the time of steps: a flight recording (lineclear admin dump), or the JSON file of `lineclear simulate
    fit`. Also step records, one JSON object a line with epoch, step, time_seconds, seconds and rows."""
    workers: str = WORKERS.field("1")
    """Numbers of workers, from 1 to 64, separated by commas. 1..64 means 1, 2, 4 and so on to 64."""
    target_ttft_p99_ms: float = WORKERS.field(0.0, ge=0, le=86_400_000)
    """Say which number of workers keeps the p99 of the time to first token below this and loses no request; 0: do not.
    Of the numbers in workers, for each rate."""
    step_spread: bool = WORKERS.field(True)
    """Vary step times as the measured ones did. Otherwise each step takes its predicted mean."""
    num_blocks: int = WORKERS.field(0, ge=0, le=2**24)
    """KV blocks of a worker; 0: as recorded."""
    block_size: int = WORKERS.field(0, ge=0, le=4096)
    """Positions of a block; 0: as recorded."""
    max_step_tokens: int = WORKERS.field(0, ge=0, le=2**20)
    """Most tokens that a worker computes in a step; 0: as recorded."""
    max_model_len: int = WORKERS.field(0, ge=0, le=2**24)
    """Context of the model; 0: as recorded."""

    out: str = OUTPUT.field("")
    """JSON file for all figures."""
    svg_file: str = OUTPUT.field("")
    """SVG file for a plot of latency against load."""

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _is_a_length(cls, value: str) -> str:
        parse_length(value)
        return value

    @field_validator("rate")
    @classmethod
    def _is_rates(cls, value: str) -> str:
        try:
            positive = all(float(part) > 0 for part in value.split(",") if part)
        except ValueError:
            positive = False
        if not positive:
            raise ValueError("give numbers above 0 separated by commas, such as 5,10,20, or inf")
        return value

    @field_validator("workers")
    @classmethod
    def _is_workers(cls, value: str) -> str:
        worker_counts(value)
        return value

    @property
    def rates(self) -> list[float]:
        """The rates, or none."""
        return [float(part) for part in self.rate.split(",") if part]


def worker_counts(text: str) -> list[int]:
    """Return the numbers that `text` lists. Raises ValueError."""
    try:
        low, dots, high = text.partition("..")
        if dots:
            found, last = [int(low)], int(high)
            while 0 < found[-1] * 2 <= last:
                found.append(found[-1] * 2)
            found += [last] if found[-1] != last else []
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= count <= 64 for count in found):
        raise ValueError("give numbers from 1 to 64 separated by commas, such as 1,2,4, or a range such as 1..64")
    return found
