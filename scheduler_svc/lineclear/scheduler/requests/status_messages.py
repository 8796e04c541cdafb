"""Build the responses of GetModel and GetStats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lineclear.scheduler.core.stats import CoreSnapshot, WorkerSnapshot
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WantedWorker, WorkerFigures
from lineclear.scheduler.requests.adapters import LoadedAdapter
from lineclear.scheduler.requests.fairness import Shares
from lineclear.scheduler.requests.request_stats import HISTOGRAMS, Quantiles, ServerStats, quantiles
from lineclear.scheduler.requests.responses import duration
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.parsed_answer import AnswerParsers
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Hello

SERVING = frozenset(("joined", "stopping"))
"""States of workers that serve."""
DEMO_NAME = "lineclear-demo"


def served_model_name(settings: SchedulerSettings, hello: Hello) -> str:
    """Return the model name that requests may use."""
    return settings.served_model_name or (DEMO_NAME if settings.demo else hello.model_id)


def model(
    settings: SchedulerSettings,
    hello: Hello,
    *,
    num_slots: int,
    has_chat_template: bool,
    has_structured_output: bool,
    parsers: AnswerParsers,
    version: str,
    adapters: Sequence[LoadedAdapter] = (),
) -> pb.GetModelResponse:
    """Build the description of the model of a worker. `num_slots` are those of all workers."""
    max_seconds = settings.max_deadline_seconds
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
        num_slots=num_slots or min(settings.max_batch_size, hello.num_slots),
        max_outputs=settings.max_outputs,
    )
    limits.default_deadline.FromMicroseconds(round(min(settings.default_deadline_seconds, max_seconds) * 1e6))
    limits.max_deadline.FromMicroseconds(round(max_seconds * 1e6))
    return pb.GetModelResponse(
        model_id=served_model_name(settings, hello),
        family=hello.family,
        context_length=hello.max_model_len,
        vocab_size=hello.vocab_size,
        eos_token_ids=hello.eos_token_ids,
        dtype=hello.dtype,
        device=hello.device,
        has_chat_template=has_chat_template,
        has_structured_output=has_structured_output,
        attention_backend=hello.attention_backend,
        limits=limits,
        server_version=version,
        model_fingerprint=hello.model_fingerprint,
        adapters=[pb.Adapter(name=a.name, digest=a.files.key.hex(), rank=a.files.rank) for a in adapters],
        tool_call_parser=parsers.tool_calls,
        reasoning_parser=parsers.reasoning,
    )


def stats(
    settings: SchedulerSettings,
    snapshot: EngineSnapshot,
    figures: ServerStats,
    now: float,
    *,
    num_admitted: int,
    wanted: Sequence[WantedWorker],
    shares: Shares,
    num_beams_running: int,
    open_streams: int,
    asyncio_tasks: int,
    num_adapters: int,
    version: str,
) -> pb.GetStatsResponse:
    """Build GetStatsResponse. Requests are counted as their callers see them, tokens and steps as the core does."""
    counters = snapshot.core.counters
    gauges = _gauges(snapshot.core, shares, num_beams_running, open_streams, asyncio_tasks)
    gauges.num_lora_adapters = num_adapters
    workers = _workers(snapshot) + _absent_workers(snapshot, wanted)
    gauges.num_workers_wanted = len(wanted)
    gauges.num_workers_joined = sum(worker.state in SERVING for worker in workers)
    gauges.num_workers_given_up = sum(worker.is_given_up for worker in wanted)
    joined = {worker.pid for worker in workers if worker.state in SERVING}
    gauges.num_workers_starting = sum(not worker.is_given_up and worker.pid not in joined for worker in wanted)
    return pb.GetStatsResponse(
        uptime=duration(figures.uptime_seconds(now)),
        counters=_counters(snapshot.core, figures, num_admitted),
        gauges=gauges,
        **{f"{name}_seconds": _quantiles(figures.window(timing)) for name, timing in HISTOGRAMS.items()},
        step_seconds=_quantiles(quantiles(seconds for _, seconds in snapshot.step_seconds)),
        generation_tokens_per_second=figures.tokens_per_second(now),
        worker=_worker_status(snapshot),
        workers=workers,
        batching_strategy=settings.batching_strategy,
        scheduling_policy=settings.scheduling_policy,
        server_version=version,
        mean_batch_size=counters.rows / max(1, counters.steps),
        prefix_cache_hit_ratio=counters.prefix_cache_hits / max(1, counters.prefix_cache_queries),
    )


def for_tenant(stats: pb.GetStatsResponse) -> pb.GetStatsResponse:
    """Return the part of the statistics that a tenant may see: the load and the worker.

    Counters, quantiles, rates and gauges in tokens or blocks are left out. Their change during another tenant's request
    would reveal the lengths of its prompt and its answer.
    """
    shown = pb.GetStatsResponse(
        uptime=stats.uptime,
        gauges=pb.Gauges(
            num_requests_waiting=stats.gauges.num_requests_waiting,
            num_requests_running=stats.gauges.num_requests_running,
            draining=stats.gauges.draining,
        ),
        worker=stats.worker,
        workers=[
            pb.WorkerStats(index=w.index if w.HasField("index") else None, state=w.state, pid=w.pid, device=w.device)
            for w in stats.workers
        ],
        batching_strategy=stats.batching_strategy,
        scheduling_policy=stats.scheduling_policy,
        server_version=stats.server_version,
    )
    for name in ("step_base_seconds", "step_seconds_per_token", "step_seconds_per_kv_token"):
        shown.worker.ClearField(name)  # fitted to the steps of all tenants
    return shown


def _counters(core: CoreSnapshot, figures: ServerStats, num_admitted: int) -> pb.Counters:
    of_requests = {"requests_admitted": num_admitted} | figures.request_counters()
    counters = pb.Counters(**(dataclasses.asdict(core.counters) | of_requests))
    counters.generation_tokens += figures.search_tokens
    return counters


def _gauges(
    core: CoreSnapshot, shares: Shares, num_beams_running: int, open_streams: int, asyncio_tasks: int
) -> pb.Gauges:
    # Between two steps a beam search has no request in the core, so its beams are counted where the search is.
    return pb.Gauges(
        num_requests_waiting=core.num_requests_waiting - core.num_search_steps_waiting,
        num_tokens_waiting=core.num_tokens_waiting,
        num_requests_running=core.num_requests_running - core.num_search_steps_running + num_beams_running,
        steps_in_flight=core.steps_in_flight,
        num_blocks=core.num_blocks,
        blocks_used=core.blocks_used,
        blocks_cached=core.blocks_cached,
        kv_cache_usage_ratio=core.blocks_used / max(1, core.num_blocks),
        open_streams=open_streams,
        asyncio_tasks=asyncio_tasks,
        draining=core.draining,
        last_step_tokens=core.last_step_tokens,
        last_step_positions=core.last_step_positions,
        predicted_wait_seconds=core.predicted_wait_seconds or 0.0,
        fairness_index=shares.index,
        fairness_gap_tokens=shares.gap_tokens,
    )


def _worker_status(snapshot: EngineSnapshot) -> pb.WorkerStatus:
    base, per_token, per_kv_token = snapshot.core.step_time
    hello = snapshot.worker.hello
    status = pb.WorkerStatus(
        up=hello is not None,
        joins=snapshot.worker.num_joins,
        step_base_seconds=base,
        step_seconds_per_token=per_token,
        step_seconds_per_kv_token=per_kv_token,
    )
    if hello is not None:
        status.pid, status.device, status.dtype = hello.pid, hello.device, hello.dtype
        status.attention_backend = hello.attention_backend
        status.torch_version, status.transformers_version = hello.torch_version, hello.transformers_version
    return status


def _workers(snapshot: EngineSnapshot) -> list[pb.WorkerStats]:
    cores = {worker.epoch: worker for worker in snapshot.core.workers}
    return [_worker_stats(figures, cores.get(figures.hello.epoch), snapshot) for figures in snapshot.workers]


def _absent_workers(snapshot: EngineSnapshot, wanted: Sequence[WantedWorker]) -> list[pb.WorkerStats]:
    """Return the workers that the server keeps running, and that the engine has not seen since their start."""
    pids = {figures.hello.pid for figures in snapshot.workers}
    indices = {figures.index for figures in snapshot.workers}
    return [
        pb.WorkerStats(index=worker.number, state="given_up" if worker.is_given_up else "starting", pid=worker.pid or 0)
        for worker in wanted
        if worker.pid not in pids and worker.number not in indices
    ]


def _worker_stats(figures: WorkerFigures, core: WorkerSnapshot | None, snapshot: EngineSnapshot) -> pb.WorkerStats:
    hello = figures.hello
    step_seconds = [seconds for epoch, seconds in snapshot.step_seconds if epoch == hello.epoch]
    stats = pb.WorkerStats(
        index=figures.index,
        state=figures.state,
        epoch=hello.epoch,
        pid=hello.pid,
        device=hello.device,
        joins=figures.joins,
        steps=figures.num_steps,
        step_seconds=sum(step_seconds) / max(1, len(step_seconds)),
        generation_tokens_per_second=figures.tokens_per_second,
        num_slots=hello.num_slots,
        num_blocks=hello.num_blocks,
    )
    if core is not None:
        stats.num_slots = core.num_slots
        stats.num_requests_running, stats.steps_in_flight = core.num_requests_running, core.steps_in_flight
        stats.blocks_used, stats.blocks_cached = core.blocks_used, core.blocks_cached
    return stats


def _quantiles(quantiles: Quantiles) -> pb.Quantiles:
    return pb.Quantiles(**dataclasses.asdict(quantiles))
