"""The scheduling options of a batcher: the names, units and meaning of the server's settings."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

from lineclear.errors import InvalidRequest
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES, QUEUE_ORDERS, STRATEGIES, PolicySettings

OnError = Literal["isolate", "fail"]


class Options(TypedDict, total=False):
    """Keyword arguments of both batchers. docs/configuration.md describes each under its flag."""

    max_batch_size: int
    """Most requests in one step (slots); 8."""
    min_batch_size: int
    """Requests that an idle batcher waits for, at most `batch_timeout_ms`; 1."""
    batch_timeout_ms: float
    """Longest wait for a batch to fill; 50. `fixed_size` waits without limit unless it is given."""
    batching_strategy: str
    """continuous, fixed_size, dynamic_timeout or adaptive."""
    scheduling_policy: str
    """fifo, prefill_first, priority, shortest, deadline or fair."""
    priority_aging_seconds: float
    """Wait that raises a request by one priority; 30."""
    max_queue_size: int
    """Most waiting requests; 1024. A further one raises QueueFull."""
    on_error: OnError
    """isolate: an exception of the step function voids the step, its requests run again, and a request that fails alone
    fails with the exception. fail: all requests of the step fail with it."""


def core_limits(
    options: Options,
    *,
    target_step_seconds: float,
    max_prefill_slowdown: float = 2.0,
    preemption_policy: str = "cheapest",
    **given: Any,
) -> CoreLimits:
    """Return the core's limits of `options` and of `given`, which are checked.

    Raises ValueError for an option that is out of range, and TypeError for an unknown one.
    """
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; the options are {', '.join(Options.__annotations__)}")
    max_batch_size = whole("max_batch_size", options.get("max_batch_size", 8), 1, 4096)
    min_batch_size = whole("min_batch_size", options.get("min_batch_size", 1), 1, max_batch_size)
    timeout_ms = real("batch_timeout_ms", options.get("batch_timeout_ms", 50.0), 0, 60_000)
    aging_seconds = real("priority_aging_seconds", options.get("priority_aging_seconds", 30.0), 0.001, 86_400)
    _check_name("on_error", options.get("on_error", "isolate"), ("isolate", "fail"))
    return CoreLimits(
        max_batch_size=max_batch_size,
        pipeline_depth=1,  # the step function returns the tokens that the next step computes
        max_queue_size=whole("max_queue_size", options.get("max_queue_size", 1024), 1, 2**24),
        batching_strategy=_check_name("batching_strategy", options.get("batching_strategy", "continuous"), STRATEGIES),
        scheduling_policy=_check_name("scheduling_policy", options.get("scheduling_policy", "fifo"), QUEUE_ORDERS),
        preemption_policy=_check_name("preemption_policy", preemption_policy, PREEMPTION_POLICIES),
        **given,
        policy=PolicySettings(
            min_batch_size=min_batch_size,
            batch_timeout_seconds=timeout_ms / 1000,
            priority_aging_seconds=aging_seconds,
            target_inter_token_latency_seconds=target_step_seconds,
            max_prefill_slowdown=max_prefill_slowdown,
            fixed_size_timeout_seconds=timeout_ms / 1000 if "batch_timeout_ms" in options else None,
        ),
    )


def _check_name(option: str, name: str, names: object) -> str:
    known = [str(entry) for entry in names]  # type: ignore[attr-defined]
    if name not in known:
        raise ValueError(f"{option} is {name!r}; give one of {', '.join(known)}")
    return name


MAX_TOKEN = 2**31 - 1
MAX_COUNT = 2**31 - 1
_LONGEST_SECONDS = 366 * 86_400.0


def whole(name: str, value: Any, low: int, high: int, error: type[Exception] = ValueError) -> int:
    """Return an integer in [low, high]. Raises `error` for anything else, True and 1.0 included."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise error(f"{name} is {value!r}; give a whole number from {low} to {high}")
    return number


def real(name: str, value: Any, low: float, high: float, error: type[Exception] = ValueError) -> float:
    """Return a number in [low, high]. Raises `error` for anything else, NaN and True included."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise error(f"{name} is {value!r}; give a number from {low:g} to {high:g}")
    return number


def deadline(timeout_seconds: float | None) -> float | None:
    """Return the time on the monotonic clock at which a request expires. Raises InvalidRequest."""
    if timeout_seconds is None:
        return None
    seconds = real("timeout_seconds", timeout_seconds, -_LONGEST_SECONDS, math.inf, InvalidRequest)
    return time.monotonic() + min(seconds, _LONGEST_SECONDS)


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return token ids, of a list, an array or any other sequence. Raises InvalidRequest."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} is no sequence of token ids")
    try:
        found = tuple(map(operator.index, values))
    except TypeError:
        raise InvalidRequest(f"{name} has an entry that is no whole number") from None
    if found and not 0 <= min(found) <= max(found) < MAX_TOKEN:
        raise InvalidRequest(f"{name} has an entry outside [0, {MAX_TOKEN})")
    return found
