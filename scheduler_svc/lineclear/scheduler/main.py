"""The scheduler process: puts the parts together, and takes them apart in the right order when it is told to leave.

Decides when the process ends and with which exit code. What the parts do is theirs: settings -> core -> link -> engine
-> supervisor (where we start the worker) -> service -> server.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
import uvloop
from prometheus_client.core import Metric

from lineclear import logs
from lineclear.errors import InternalError, LineclearError, WorkerUnavailable
from lineclear.scheduler.access.interceptor import anatomy, incident
from lineclear.scheduler.engine import Engine, EngineLimits
from lineclear.scheduler.leaving import (
    CLEAN,
    CONFIGURATION,
    INTERNAL,
    NO_WORKER,
    WORKER_CONFIGURATION,
    WORKER_STUCK,
    Leaving,
)
from lineclear.scheduler.link import Link
from lineclear.scheduler.model_files import demo_directory, model_directory, read_json
from lineclear.scheduler.operations import Operations
from lineclear.scheduler.pulse import Pulse
from lineclear.scheduler.recording import replay
from lineclear.scheduler.recording.recorder import RecordedScheduler
from lineclear.scheduler.recording.recordings import Recordings
from lineclear.scheduler.rpc.admin import AdminService
from lineclear.scheduler.rpc.server import Server
from lineclear.scheduler.rpc.service import VERSION, InferenceService, drained
from lineclear.scheduler.scheduling.core import CoreLimits, Scheduler
from lineclear.scheduler.scheduling.policy import PolicySettings
from lineclear.scheduler.scrapes import Scrapes
from lineclear.scheduler.settings import ConfigurationError, SchedulerSettings, load
from lineclear.scheduler.supervisor import GiveUp, Supervisor, SupervisorLimits
from lineclear.scheduler.text.chat import load_chat_template
from lineclear.scheduler.text.tokenizer import load_tokenizer
from lineclear.sockets import SocketError

log = structlog.get_logger()

_WITHOUT_WORKER = {
    GiveUp.CRASHES: NO_WORKER,
    GiveUp.CONFIGURATION: WORKER_CONFIGURATION,
    GiveUp.STUCK: WORKER_STUCK,
    GiveUp.BUG: INTERNAL,
}

_METRICS_SECONDS = 2.0  # for the event loop to say its figures
_STATUS_SECONDS = 2.0  # for the last statuses to reach their readers


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scheduler until it is told to leave, or replay what one has recorded. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["replay"]:
        return replay.main(arguments[1:])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        settings, worker_flags = load(arguments)
    except ConfigurationError as error:
        print(f"lineclear-scheduler: {error}", file=sys.stderr)
        return CONFIGURATION
    writer = logs.configure("scheduler", settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, worker_flags))
    except (ConfigurationError, SocketError) as error:
        log.error("configuration", problem=str(error))
        return CONFIGURATION
    finally:
        writer.close()


async def _serve(settings: SchedulerSettings, worker_flags: Sequence[str]) -> int:
    log.info("settings", version=VERSION, pid=os.getpid(), **settings.model_dump())
    asyncio.get_running_loop().set_exception_handler(_log_loop_error)
    leaving = Leaving()
    leaving.listen_to_signals()
    model = _model(settings)
    tokenizer = load_tokenizer(model)
    chat = load_chat_template(model, tokenizer)
    service = InferenceService(settings, tokenizer, chat, read_json(model / "generation_config.json"))
    admin = AdminService(settings, service)
    server = Server(settings, service, admin)
    with _socket_directory(settings) as directory, contextlib.ExitStack() as stack:
        stack.callback(service.close)
        link = Link(directory, max_plans_in_flight=settings.pipeline_depth)
        stack.callback(link.close)
        supervisor = Supervisor(
            _worker_command(settings, model, directory, worker_flags),
            limits=_supervisor_limits(settings),
            on_exit=lambda pid, exit_code: engine.worker_exited(pid, exit_code),
            on_give_up=lambda reason: leaving.begin(_WITHOUT_WORKER[supervisor.given_up or GiveUp.BUG], reason),
        )
        core, recordings = _core(settings)
        stack.callback(recordings.wait)
        engine = Engine(
            core,
            link,
            service.publish,
            limits=_engine_limits(settings),
            on_joined=supervisor.worker_joined,
            on_broken=supervisor.worker_broken,
            on_explained=supervisor.crashes_explained,
            on_anomaly=recordings.dump,
            on_fatal=leaving.on_fatal,
        )
        operations = Operations(leaving, engine, recordings)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, operations.begin_recording, "SIGUSR2")
        service.attach(engine)
        admin.attach(operations)
        service.on_worker = server.set_ready
        service.on_fatal = leaving.on_fatal
        engine.start()
        stack.callback(engine.stop)
        pulse = Pulse(
            engine.busy_seconds,
            server.set_live,
            limit_seconds=settings.standstill_seconds,
            on_beat=lambda: server.set_worker_hung(engine.is_worker_hung),
        )
        pulse.start()
        stack.callback(pulse.stop)
        async with _scraped(settings, service):
            await _run(settings, leaving, service, server, supervisor)
    log.info("left", exit_code=leaving.exit_code)
    return leaving.exit_code


@contextlib.asynccontextmanager
async def _scraped(settings: SchedulerSettings, service: InferenceService) -> AsyncIterator[None]:
    """Prometheus finds its figures, where a place for them is set; also while the server leaves."""
    if not settings.metrics_listen:
        yield
        return
    loop = asyncio.get_running_loop()

    def collect() -> list[Metric]:
        return asyncio.run_coroutine_threadsafe(service.metrics(), loop).result(_METRICS_SECONDS)

    scrapes = Scrapes(settings.metrics_listen, collect)
    log.info("metrics", address=scrapes.address)
    try:
        yield
    finally:
        await asyncio.to_thread(scrapes.close)


async def _run(
    settings: SchedulerSettings,
    leaving: Leaving,
    service: InferenceService,
    server: Server,
    supervisor: Supervisor,
) -> None:
    """Serve until it is time to leave, then leave. The worker is told last, while the engine still listens to it."""
    try:
        if settings.spawn_worker:
            supervisor.start()
        await server.start()
        log.info(
            "listening",
            address=server.address,
            admin_address=server.admin_address,
            health_address=server.health_address,
        )
        # What starting left behind stays; looking through it again and again for garbage would hold up everybody.
        gc.collect()
        gc.freeze()
        await leaving.begun.wait()
        if not await leaving.unless_hurried(_leave(leaving, settings, service, server)):
            service.fail_all(drained)
            await server.stop(0)
    finally:
        if settings.spawn_worker:
            # In a hurry the worker is not waited for: it ends with us, see lifeline.
            await leaving.unless_hurried(supervisor.stop())


async def _leave(leaving: Leaving, settings: SchedulerSettings, service: InferenceService, server: Server) -> None:
    """Not ready, no new requests, those in progress to their end or the timeout, the listeners last.

    Whoever comes is told why not here, until the listeners are closed.
    """
    exit_code = leaving.exit_code
    server.leave()
    linger = asyncio.ensure_future(asyncio.sleep(settings.drain_linger_seconds))
    if exit_code == CLEAN:
        await service.drain(settings.drain_timeout_seconds)
    else:
        error = _died(leaving.failure) if exit_code == INTERNAL else _no_worker
        service.refuse(error)
        service.fail_all(lambda mailbox: error())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STATUS_SECONDS):
            await service.streams.wait_until_idle()
    await linger
    await server.stop(_STATUS_SECONDS)


def _no_worker() -> WorkerUnavailable:
    return WorkerUnavailable(
        "there is no worker, and there will be none; the server is shutting down", retry_after_seconds=5.0
    )


def _died(failure: BaseException) -> Callable[[], LineclearError]:
    error = incident("scheduler", failure)
    return lambda: InternalError(str(error), metadata=error.metadata)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """In place of asyncio's own, which prints the text of exceptions."""
    error = context.get("exception")
    log.error("loop_error", problem=context["message"], **(anatomy(error) if error is not None else {}))


# --- from settings ---------------------------------------------------------------------------------------------------


def _model(settings: SchedulerSettings) -> Path:
    if settings.demo:
        return demo_directory()
    if not settings.model:
        raise ConfigurationError("no model is named; use --model DIR, or --demo")
    return model_directory(settings.model)


@contextlib.contextmanager
def _socket_directory(settings: SchedulerSettings) -> Iterator[Path]:
    """The directory set, which stays, or a private one for as long as we run."""
    if settings.socket_directory:
        yield Path(settings.socket_directory)
        return
    if not settings.spawn_worker:
        raise ConfigurationError(
            "a worker that we do not start must know where to find us; name a --socket-directory, or use --spawn-worker"
        )
    parent = os.environ.get("XDG_RUNTIME_DIR")
    made = tempfile.mkdtemp(prefix="lineclear-", dir=parent if parent and os.access(parent, os.W_OK) else None)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _worker_command(
    settings: SchedulerSettings, model: Path, directory: Path, worker_flags: Sequence[str]
) -> list[str]:
    """The worker is told what it must share with us; the flags after `--` come last and win."""
    shared = {
        "--model": str(model),
        "--directory": str(directory),
        "--num-slots": str(settings.max_batch_size),
        "--max-step-tokens": str(settings.target_batch_tokens),
        "--log-level": settings.log_level,
        "--log-format": _log_format(settings),
    }
    given = {flag.partition("=")[0] for flag in worker_flags}
    command = settings.worker_command or (sys.executable, "-P", "-m", "lineclear.worker.main")
    flags = [part for flag, value in shared.items() if flag not in given for part in (flag, value)]
    return [*command, *flags, *worker_flags]


def _log_format(settings: SchedulerSettings) -> str:
    """The worker writes to the same standard error, so in the same form."""
    if settings.log_format == "auto":
        return "console" if sys.stderr.isatty() else "json"
    return settings.log_format


def _core(settings: SchedulerSettings) -> tuple[Scheduler, Recordings]:
    core = RecordedScheduler(_core_limits(settings), settings.recorded_calls)
    directory = Path(settings.recording_directory) if settings.recording_directory else None
    return core, Recordings(core, directory)


def _core_limits(settings: SchedulerSettings) -> CoreLimits:
    return CoreLimits(
        max_batch_size=settings.max_batch_size,
        target_batch_tokens=settings.target_batch_tokens,
        pipeline_depth=settings.pipeline_depth,
        max_queue_size=settings.max_queue_size,
        max_queue_tokens=settings.max_queue_tokens,
        max_preemptions=settings.max_preemptions,
        max_bypasses=settings.max_bypasses,
        max_lone_crashes=settings.max_lone_crashes,
        # Two strikes come before; then the verdict falls when the next death would be one too many.
        max_lone_kills=max(1, settings.max_worker_crashes - 2),
        prefix_cache=settings.prefix_cache,
        cache_secret=secrets.token_bytes(32),  # a new one for each process: keys of cached prefixes cannot be guessed
        strategy=settings.batching_strategy,
        order=settings.order,
        victim=settings.victim,
        policy=PolicySettings(
            min_batch_size=settings.min_batch_size,
            batch_timeout_seconds=settings.batch_timeout_ms / 1000,
            ageing_seconds=settings.ageing_seconds,
            inter_token_target_seconds=settings.inter_token_target_ms / 1000,
            decode_stretch=settings.decode_stretch,
        ),
    )


def _engine_limits(settings: SchedulerSettings) -> EngineLimits:
    return EngineLimits(
        step_timeout_seconds=settings.step_timeout_seconds,
        cold_step_timeout_seconds=max(settings.cold_step_timeout_seconds, settings.step_timeout_seconds),
        heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
    )


def _supervisor_limits(settings: SchedulerSettings) -> SupervisorLimits:
    return SupervisorLimits(
        max_crashes=settings.max_worker_crashes,
        crash_window_seconds=settings.crash_window_seconds,
        start_timeout_seconds=settings.start_timeout_seconds,
        stop_timeout_seconds=settings.stop_timeout_seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
