"""Build the responses of GetModel and GetStats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import version

from lineclear.scheduler.core.stats import CoreSnapshot, WorkerSnapshot
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WantedWorker, WorkerFigures
from lineclear.scheduler.requests.request_metrics import HISTOGRAMS, ServerStats, quantiles
from lineclear.scheduler.requests.responses import duration
from lineclear.scheduler.requests.served_model import served_model_name
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Hello

SERVING = frozenset(("joined", "stopping"))
"""States of workers that serve."""
VERSION = version("lineclear")

# Fields of messages that have the name of a setting, of a field of Hello, of the core's snapshot.
_LIMITS = (
    *("max_queue_size", "max_queue_tokens", "pipeline_depth", "default_max_tokens", "max_prompt_bytes"),
    "max_outputs",
)
_COMPUTATION = ("device", "dtype", "attention_backend", "forward_pass", "forward_pass_reason")
_MODEL_FIELDS = ("family", "vocab_size", "eos_token_ids", "model_fingerprint", *_COMPUTATION)
_WORKER_FIELDS = ("pid", "torch_version", "transformers_version", *_COMPUTATION)
WORKER_MEMORY = ("weight_bytes", "kv_cache_bytes", "step_memory_bytes", "swap_memory_bytes")
_GAUGES = (
    *("num_tokens_waiting", "steps_in_flight", "num_blocks", "blocks_used", "blocks_cached", "draining"),
    *("last_step_tokens", "last_step_positions"),
)


def model(settings: SchedulerSettings, hello: Hello, num_slots: int) -> pb.GetModelResponse:
    """Build the description of the model of a worker. `num_slots` are those of all workers; 0 without one."""
    max_batch_size, max_seconds = min(settings.max_batch_size, hello.num_slots), settings.max_deadline_seconds
    limits = pb.Limits(
        max_batch_size=max_batch_size,
        target_batch_tokens=hello.step_tokens(settings.target_batch_tokens),
        block_size_tokens=hello.block_size,
        num_blocks=hello.num_blocks,
        num_slots=num_slots or max_batch_size,
        **{name: getattr(settings, name) for name in _LIMITS},
    )
    limits.default_deadline.FromMicroseconds(round(min(settings.default_deadline_seconds, max_seconds) * 1e6))
    limits.max_deadline.FromMicroseconds(round(max_seconds * 1e6))
    return pb.GetModelResponse(
        model_id=served_model_name(settings, hello),
        context_length=hello.max_model_len,
        limits=limits,
        server_version=VERSION,
        **{name: getattr(hello, name) for name in _MODEL_FIELDS},
    )


def stats(
    settings: SchedulerSettings,
    snapshot: EngineSnapshot,
    figures: ServerStats,
    wanted: Sequence[WantedWorker],
    now: float,
) -> pb.GetStatsResponse:
    """Build GetStatsResponse from what engine, ended requests and supervisor count."""
    core, counters = snapshot.core, snapshot.core.counters
    workers = [*_workers(snapshot), *_absent_workers(snapshot, wanted)]
    joined = {worker.pid for worker in workers if worker.state in SERVING}
    return pb.GetStatsResponse(
        uptime=duration(now - figures.since),
        counters=_counters(core, figures),
        gauges=pb.Gauges(
            num_requests_waiting=core.num_requests_waiting - core.num_search_steps_waiting,
            num_requests_running=core.num_requests_running - core.num_search_steps_running,
            kv_cache_usage_ratio=core.blocks_used / max(1, core.num_blocks),
            predicted_wait_seconds=core.predicted_wait_seconds or 0.0,
            num_workers_wanted=len(wanted),
            num_workers_joined=sum(worker.state in SERVING for worker in workers),
            num_workers_given_up=sum(worker.is_given_up for worker in wanted),
            num_workers_starting=sum(not worker.is_given_up and worker.pid not in joined for worker in wanted),
            **{name: getattr(core, name) for name in _GAUGES},
        ),
        **{f"{name}_seconds": figures.window(timing) for name, timing in HISTOGRAMS.items()},
        step_seconds=quantiles(seconds for _, seconds in snapshot.step_seconds),
        generation_tokens_per_second=figures.output.per_second(now),
        worker=_worker_status(snapshot),
        workers=workers,
        batching_strategy=settings.batching_strategy,
        scheduling_policy=settings.scheduling_policy,
        server_version=VERSION,
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


def _counters(core: CoreSnapshot, figures: ServerStats) -> pb.Counters:
    counters = pb.Counters(**(dataclasses.asdict(core.counters) | figures.request_counters()))
    counters.generation_tokens += figures.search_tokens
    return counters


def _worker_status(snapshot: EngineSnapshot) -> pb.WorkerStatus:
    base, per_token, per_kv_token = snapshot.core.step_time
    hello = snapshot.worker.hello
    return pb.WorkerStatus(
        up=hello is not None,
        joins=snapshot.worker.num_joins,
        step_base_seconds=base,
        step_seconds_per_token=per_token,
        step_seconds_per_kv_token=per_kv_token,
        **({} if hello is None else {name: getattr(hello, name) for name in _WORKER_FIELDS}),
    )


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
        num_state_snapshots=hello.num_state_snapshots,
        load_seconds=hello.load_seconds,
        **{name: getattr(hello, name) for name in WORKER_MEMORY},
    )
    if core is not None:
        stats.num_slots = core.num_slots
        stats.num_requests_running, stats.steps_in_flight = core.num_requests_running, core.steps_in_flight
        stats.blocks_used, stats.blocks_cached = core.blocks_used, core.blocks_cached
        stats.state_snapshots_used, stats.state_snapshot_hits = core.state_snapshots_used, core.state_snapshot_hits
    return stats
