"""Messages about the server itself: what GetModel and GetStats answer."""

from __future__ import annotations

import dataclasses

from lineclear.scheduler.core.stats import CoreSnapshot
from lineclear.scheduler.engine.engine_stats import EngineSnapshot
from lineclear.scheduler.requests.request_stats import Quantiles, ServerStats, quantiles
from lineclear.scheduler.requests.responses import duration
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Hello

DEMO_NAME = "lineclear-demo"


def served_model_name(settings: SchedulerSettings, hello: Hello) -> str:
    """The name that requests may call the model by."""
    return settings.served_model_name or (DEMO_NAME if settings.demo else hello.model_id)


def model(settings: SchedulerSettings, hello: Hello, *, has_chat_template: bool, version: str) -> pb.GetModelResponse:
    """What a worker that said `hello` serves."""
    most_seconds = settings.max_deadline_seconds
    limits = pb.Limits(
        max_batch_size=min(settings.max_batch_size, hello.num_slots),
        target_batch_tokens=min(settings.target_batch_tokens or hello.max_step_tokens, hello.max_step_tokens),
        max_queue_size=settings.max_queue_size,
        max_queue_tokens=settings.max_queue_tokens,
        block_size_tokens=hello.block_size,
        num_blocks=hello.num_blocks,
        pipeline_depth=settings.pipeline_depth,
        default_max_tokens=settings.default_max_tokens,
        max_prompt_bytes=settings.max_prompt_bytes,
    )
    limits.default_deadline.FromMicroseconds(round(min(settings.default_deadline_seconds, most_seconds) * 1e6))
    limits.max_deadline.FromMicroseconds(round(most_seconds * 1e6))
    return pb.GetModelResponse(
        model_id=served_model_name(settings, hello),
        family=hello.family,
        context_length=hello.max_model_len,
        vocab_size=hello.vocab_size,
        eos_token_ids=hello.eos_token_ids,
        dtype=hello.dtype,
        device=hello.device,
        has_chat_template=has_chat_template,
        attention_backend=hello.attention_backend,
        limits=limits,
        server_version=version,
        model_fingerprint=hello.model_fingerprint,
    )


def stats(
    settings: SchedulerSettings,
    snapshot: EngineSnapshot,
    figures: ServerStats,
    now: float,
    *,
    num_rejected: int,
    streams_open: int,
    tasks: int,
    version: str,
) -> pb.GetStatsResponse:
    """The engine's figures and ours. `num_rejected` are those that the core never saw."""
    return pb.GetStatsResponse(
        uptime=duration(figures.uptime_seconds(now)),
        totals=_totals(snapshot.core, num_rejected),
        gauges=_gauges(snapshot.core, streams_open, tasks),
        queue_seconds=_quantiles(figures.window("queue")),
        first_token_seconds=_quantiles(figures.window("first_token")),
        inter_token_seconds=_quantiles(figures.window("inter_token")),
        total_seconds=_quantiles(figures.window("total")),
        step_seconds=_quantiles(quantiles(step.step_seconds for step in snapshot.step_times)),
        output_tokens_per_second=figures.tokens_per_second(now),
        worker=_worker_status(snapshot),
        batching_strategy=settings.batching_strategy,
        order=settings.scheduling_policy,
        server_version=version,
    )


def for_tenant(stats: pb.GetStatsResponse) -> pb.GetStatsResponse:
    """Return what one tenant may see: how busy the server is and what it runs on.

    Totals, quantiles, rates and gauges in tokens or blocks are left out: before and after another tenant's request
    they tell how long its prompt and its answer were.
    """
    shown = pb.GetStatsResponse(
        uptime=stats.uptime,
        gauges=pb.Gauges(
            requests_waiting=stats.gauges.requests_waiting,
            requests_running=stats.gauges.requests_running,
            draining=stats.gauges.draining,
        ),
        worker=stats.worker,
        batching_strategy=stats.batching_strategy,
        order=stats.order,
        server_version=stats.server_version,
    )
    for name in ("step_base_seconds", "step_seconds_per_token", "step_seconds_per_kv_token"):
        shown.worker.ClearField(name)  # fitted to the steps of all tenants
    return shown


def _totals(core: CoreSnapshot, num_rejected: int) -> pb.Totals:
    counters = core.counters
    names = [field.name for field in dataclasses.fields(counters) if field.name in pb.Totals.DESCRIPTOR.fields_by_name]
    totals = pb.Totals(**{name: getattr(counters, name) for name in names})
    totals.requests_rejected += num_rejected  # before they came to the core
    totals.prefix_hit_rate = counters.cached_tokens / max(1, counters.looked_up_tokens)
    totals.mean_batch_size = counters.rows / max(1, counters.steps)
    return totals


def _gauges(core: CoreSnapshot, streams_open: int, tasks: int) -> pb.Gauges:
    return pb.Gauges(
        requests_waiting=core.requests_waiting,
        tokens_waiting=core.tokens_waiting,
        requests_running=core.requests_running,
        steps_in_flight=core.steps_in_flight,
        blocks_total=core.blocks_total,
        blocks_used=core.blocks_used,
        blocks_cached=core.blocks_cached,
        streams_open=streams_open,
        tasks=tasks,
        draining=core.draining,
    )


def _worker_status(snapshot: EngineSnapshot) -> pb.WorkerStatus:
    base, per_token, per_kv_token = snapshot.core.step_time
    hello = snapshot.worker.hello
    status = pb.WorkerStatus(
        joined=hello is not None,
        incarnation=snapshot.worker.num_joins,
        step_base_seconds=base,
        step_seconds_per_token=per_token,
        step_seconds_per_kv_token=per_kv_token,
    )
    if hello is not None:
        status.pid, status.device, status.dtype = hello.pid, hello.device, hello.dtype
        status.attention_backend = hello.attention_backend
        status.torch_version, status.transformers_version = hello.torch_version, hello.transformers_version
    return status


def _quantiles(of_window: Quantiles) -> pb.Quantiles:
    return pb.Quantiles(**dataclasses.asdict(of_window))
