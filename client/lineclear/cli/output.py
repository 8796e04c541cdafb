"""The output of the command. Answers are written to standard output, everything else to standard error."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lineclear.client import Delta, Stream, ToolCall, sigint
from lineclear.client.message_classes import Counters, Gauges, Model, Quantiles, Stats, WorkerStats, WorkerStatus
from lineclear.client.results import Generation, Queued
from lineclear.errors import LineclearError

from . import exit_status

# A model may generate escape sequences of a terminal.
_CONTROLS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


def strip_control_chars(text: str) -> str:
    """Replace the control characters of `text`."""
    return text.translate(_CONTROLS)


def show(text: str) -> None:
    """Write a piece of an answer, on a terminal without control characters."""
    if text:
        sys.stdout.write(strip_control_chars(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def queue_notice() -> Callable[[Queued], None] | None:
    """Return a function that writes a place in the queue to standard error; None if that is no terminal."""
    return _show_place if sys.stderr.isatty() else None


def _show_place(queued: Queued) -> None:
    wait = queued.predicted_wait_seconds
    until = "" if wait is None else f", about {wait:.1f} s"
    print_stderr(f"waiting in the queue, {queued.requests_ahead} ahead{until}")


def read_answer(stream: Stream, *, is_shown: bool, on_delta: Callable[[Delta], None] | None = None) -> None:
    """Read an answer to its end. `is_shown`: write its text while it streams, and its tool calls."""
    with sigint.cancel_on_sigint(stream.cancel), stream:
        try:
            if is_shown:
                _show_answer(stream)
            for delta in stream:
                if on_delta is not None:
                    on_delta(delta)
        finally:
            if is_shown:
                show("\n" if stream.text else "")
                show_calls(stream.tool_calls)


def _show_answer(stream: Stream) -> None:
    """Write the text of an answer while it streams.

    An answer that may restart with another model is written at its end, except on a terminal: a reader could not
    separate the dropped part. Several outputs are written at the end, each below a line with its index.
    """
    is_buffered = stream.may_restart and not sys.stdout.isatty()
    for delta in stream:
        is_buffered = is_buffered or len(stream.texts) > 1
        if delta.restarted:
            print_stderr("\nThe model was replaced; the answer starts over.")
        if not is_buffered:
            show(delta.prompt_text + delta.text)
    if len(stream.texts) > 1:
        show(joined(stream.texts))
    elif is_buffered:
        show(stream.result.prompt_text + stream.text)


def show_calls(calls: Sequence[ToolCall]) -> None:
    """Write a line of JSON for each call: id, name and arguments. Arguments that were broken off are a text."""
    for call in calls:
        try:
            arguments: Any = call.parsed()
        except ValueError:
            arguments = call.arguments
        show_json({"id": call.id, "name": call.name, "arguments": arguments})


def joined(texts: Sequence[str]) -> str:
    """Return the texts of outputs, each below a line with its index if several."""
    if len(texts) < 2:
        return "".join(texts)
    return "\n".join(f"--- output {index}\n{text}" for index, text in enumerate(texts))


def show_json(value: Any) -> None:
    """Write one line of JSON."""
    sys.stdout.write(json_line(value, sys.stdout.encoding))
    sys.stdout.flush()


def json_line(value: Any, encoding: str = "utf-8") -> str:
    """Return one line of JSON. Characters that `encoding` lacks are escaped.

    Numbers that JSON lacks, such as the log-probability of a banned token, are null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json_line(_finite(value), encoding)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value) + "\n"
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any) -> dict[str, Any]:
    """Convert a dataclass of the client for `show_json`, without unset fields."""
    return {name: entry for name, entry in dataclasses.asdict(value).items() if entry not in (None, ())}


def print_stderr(text: str, style: str = "dim") -> None:
    """Write a line to standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(strip_control_chars(text), style=style))


def show_error(error: LineclearError) -> None:
    """Write the error, the fields that it names and a hint."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(
        Text.assemble(("error: ", "bold red"), strip_control_chars(str(error)), (f" ({error.reason})", "dim"))
    )
    for violation in error.violations:
        if violation.field not in str(error):
            console.print(Text(strip_control_chars(f"  {violation.field}: {violation.description}")))
    if (hint := exit_status.hint(error)) is not None:
        console.print(Text(hint, style="dim"))


def os_error_text(error: OSError) -> str:
    """Return the message of the system without the error number."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def summary(result: Generation) -> str:
    """Return one line with the figures of an answer."""
    usage, timings = result.usage, result.timings
    words = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"]
    if usage.cached_tokens:
        words.append(f"{usage.cached_tokens} cached")
    words.append(f"first after {timings.time_to_first_token_seconds:.3f} s")
    if timings.decode_time_seconds > 0 and usage.completion_tokens > 1:
        words.append(f"{(usage.completion_tokens - 1) / timings.decode_time_seconds:.1f} tok/s")
    words.append(result.finish_reason.replace("_", " "))
    return ", ".join(words)


def stats_view(stats: Stats) -> Group:
    """Return the tables of GetStats."""
    side_by_side = Table.grid(padding=(0, 3))
    side_by_side.add_row(_now(stats), _totals(stats.counters))
    workers = stats.workers if len(stats.workers) > 1 else ()
    tables = [_worker_table(workers[i : i + 4]) for i in range(0, len(workers), 4)]  # each fits into 80 characters
    return Group(_head(stats), side_by_side, *tables, _times(stats))


def _head(stats: Stats) -> Text:
    worker = stats.worker
    state = "draining" if stats.gauges.draining else "joined" if worker.up else "no worker"
    plain = (
        f"{stats.server_version}  up {_span(stats.uptime_seconds)}  worker {state}"
        f" (#{worker.joins}, pid {worker.pid}, {worker.device} {worker.dtype}, {worker.attention_backend},"
        f" {_forward_pass(worker)})"
        f"\nstrategy {stats.batching_strategy}, scheduling {stats.scheduling_policy}, "
    )
    rate = f"{stats.generation_tokens_per_second:.1f} tokens/s"
    return Text.assemble(("lineclear ", "bold"), strip_control_chars(plain), (rate, "bold green"))


def _now(stats: Stats) -> Table:
    gauges, workers = stats.gauges, stats.workers
    return _pairs(
        "now",
        ("workers", _worker_counts(gauges)),
        ("running", gauges.num_requests_running),
        ("waiting", f"{gauges.num_requests_waiting} ({gauges.num_tokens_waiting} tokens)"),
        ("steps in flight", gauges.steps_in_flight),
        ("streams", gauges.open_streams),
        ("blocks used", f"{gauges.blocks_used} / {gauges.num_blocks}"),
        ("blocks cached", gauges.blocks_cached),
        *_states(workers),
        ("prefix cache hits", f"{stats.prefix_cache_hit_ratio:.1%}"),
        ("mean batch size", f"{stats.mean_batch_size:.2f}"),
        ("weights", _mib(sum(worker.weight_bytes for worker in workers))),
        ("KV cache", _mib(sum(worker.kv_cache_bytes for worker in workers))),
        ("ready after", f"{max((worker.load_seconds for worker in workers), default=0.0):.1f} s"),
    )


def _states(workers: Sequence[WorkerStats]) -> Sequence[tuple[str, object]]:
    """Return the figures of recurrent states, nothing for models without."""
    if not (places := sum(worker.num_state_snapshots for worker in workers)):
        return ()
    used, hits = (sum(getattr(x, f"state_snapshot{name}") for x in workers) for name in ("s_used", "_hits"))
    running, slots = (sum(getattr(x, f"num_{name}") for x in workers) for name in ("requests_running", "slots"))
    return (
        ("states in slots", f"{running} / {slots}"),
        ("state snapshots used", f"{used} / {places}, {places - used} free"),
        ("state snapshot hits", hits),
    )


def _totals(counters: Counters) -> Table:
    drafts, accepted = counters.spec_decode_num_draft_tokens, counters.spec_decode_num_accepted_tokens
    return _pairs(
        "since start",
        ("admitted", counters.requests_admitted),
        ("finished", counters.requests_finished),
        ("rejected / failed", f"{counters.requests_rejected} / {counters.requests_failed}"),
        ("cancelled / expired", f"{counters.requests_cancelled} / {counters.requests_expired}"),
        ("prompt tokens (cached)", f"{counters.prompt_tokens} ({counters.prefix_cache_hits})"),
        ("generated tokens", counters.generation_tokens),
        ("preemptions (recomputed)", f"{counters.preemptions} ({counters.recomputed_tokens})"),
        ("steps / rows / wasted", f"{counters.steps} / {counters.rows} / {counters.wasted_samples}"),
        ("drafts (accepted)", f"{drafts} ({accepted})"),
    )


def _times(stats: Stats) -> Table:
    times = {
        "in the queue": stats.request_queue_time_seconds,
        "to the first token": stats.time_to_first_token_seconds,
        "between tokens": stats.request_mean_inter_token_latency_seconds,
        "in all": stats.e2e_request_latency_seconds,
        "a step": stats.step_seconds,
    }
    columns = ("milliseconds", "mean", "p50", "p90", "p99", "max", "count")
    return _table(columns, ((name, *_milliseconds(quantiles)) for name, quantiles in times.items()))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _worker_counts(gauges: Gauges) -> str:
    """Return how many workers serve, and of the wanted ones how many do not."""
    counts = f"{gauges.num_workers_joined} of {gauges.num_workers_wanted or gauges.num_workers_joined} joined"
    absent = (("starting", gauges.num_workers_starting), ("given up", gauges.num_workers_given_up))
    return ", ".join([counts, *(f"{count} {state}" for state, count in absent if count)])


def _worker_table(workers: Sequence[WorkerStats]) -> Table:
    """Return a column for each worker."""
    names = "worker", "state", "pid", "device", "joins", "running", "steps", "ms a step", "tokens/s"
    table: list[Sequence[Any]] = [(*names, "blocks used", "cached")]
    table += (
        (
            "" if worker.index is None else worker.index,
            strip_control_chars(worker.state),
            worker.pid,
            strip_control_chars(worker.device),
            worker.joins,
            f"{worker.num_requests_running} / {worker.num_slots}",
            worker.steps,
            f"{worker.step_seconds * 1000:.2f}",
            f"{worker.generation_tokens_per_second:.1f}",
            f"{worker.blocks_used} / {worker.num_blocks}",
            worker.blocks_cached,
        )
        for worker in workers
    )
    columns, *rows = zip(*table, strict=True)
    return _table([*map(str, columns)], rows)


def model_view(model: Model) -> Table:
    return _pairs(
        "model",
        ("id", strip_control_chars(model.model_id)),
        ("fingerprint", strip_control_chars(model.model_fingerprint)),
        ("family", strip_control_chars(model.family)),
        ("context length", model.context_length),
        ("vocabulary", model.vocab_size),
        ("end-of-sequence ids", ", ".join(map(str, model.eos_token_ids))),
        ("dtype, device", f"{model.dtype}, {model.device}"),
        ("attention", model.attention_backend),
        ("forward pass", strip_control_chars(_forward_pass(model))),
        ("chat template", "yes" if model.has_chat_template else "no"),
        ("structured output", "yes" if model.has_structured_output else "no"),
        ("parsers of calls, reasoning", f"{model.tool_call_parser or 'none'}, {model.reasoning_parser or 'none'}"),
        ("server", strip_control_chars(model.server_version)),
        *((name.replace("_", " "), getattr(model.limits, name)) for name in type(model.limits).__slots__),
    )


def _forward_pass(computed: Model | WorkerStatus) -> str:
    reason = computed.forward_pass_reason
    return computed.forward_pass + (f": {reason}" if reason else "")


def _pairs(title: str, *rows: tuple[str, Any]) -> Table:
    return _table((title, ""), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _milliseconds(quantiles: Quantiles) -> list[str]:
    spans = (quantiles.mean, quantiles.p50, quantiles.p90, quantiles.p99, quantiles.max)
    return [*(f"{seconds * 1000:.2f}" for seconds in spans), str(quantiles.count)]


def _span(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02.0f}"
