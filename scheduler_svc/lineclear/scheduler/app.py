"""Assembles, runs and shuts down core, engine, service and listeners: everything but the worker process.

`main` imports this module while the worker imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import Metric

from lineclear.errors import InternalError, LineclearError, WorkerUnavailable
from lineclear.exit_codes import ExitCode
from lineclear.process import logging_setup
from lineclear.process.exception_location import exception_fields
from lineclear.process.settings_base import ConfigurationError
from lineclear.process.standard_error import write_stderr
from lineclear.scheduler import demo, metrics_export
from lineclear.scheduler.addresses import is_local
from lineclear.scheduler.admin_operations import AdminOperations
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.engine import Engine, EngineStuck
from lineclear.scheduler.engine.engine_loop import EngineLimits, EngineLoop
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_subscribers import EngineCallbacks
from lineclear.scheduler.flight_recorder.recorder import RecordingScheduler
from lineclear.scheduler.flight_recorder.recording_files import RecordingFiles
from lineclear.scheduler.grpc_api.server import Server
from lineclear.scheduler.observe.step_feed import StepFeed
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.scheduler.requests.adapters import Adapters
from lineclear.scheduler.requests.request_manager import RequestManager, shutdown_interrupted
from lineclear.scheduler.requests.services import RequestServices, incident
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.shutdown import ShutdownController
from lineclear.scheduler.stall_watchdog import Watchdog
from lineclear.scheduler.status_page.status_server import StatusServer
from lineclear.scheduler.text.text_files import read_text_files
from lineclear.wire.messages import Hello

log = structlog.get_logger()

_METRICS_SECONDS = 2.0  # for the event loop to compute the figures of GetStats
_STATUS_SECONDS = 2.0  # for the last statuses to reach the clients


class App:
    """The parts that serve the model of one directory together. Created on the running event loop.

    The engine and its callbacks must outlive the worker, so `stack` closes them later. Constructor and `serve` raise
    ConfigurationError.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        model: Path,
        shutdown: ShutdownController,
        link: WorkerLink,
        pool: WorkerPool,
        stack: contextlib.ExitStack,
    ) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        files = read_text_files(model)
        core, recordings = _core(settings)
        stack.callback(recordings.close)
        history = StepHistory(settings.step_history)
        callbacks = EngineCallbacks(
            lambda events: self._manager.services.streams.publish(events),
            on_rejected=_on_rejected(files.fingerprint, shutdown),
            on_adapter_failed=lambda key, problem: self._manager.adapter_failed(key, problem),
            on_anomaly=recordings.dump,
            on_fatal=shutdown.on_fatal,
        )
        limits = _engine_limits(settings, files.fingerprint)
        self._settings, self._shutdown, self._pool, self._stack = settings, shutdown, pool, stack
        self._engine = engine = Engine(EngineLoop(core, link, pool, callbacks, limits, history))
        pool.on_exit = engine.worker_exited
        services = RequestServices(settings, engine, files.tokenizer, files.chat, files.generation_config, model)
        self._manager = RequestManager(services, pool.wanted)
        services.streams.on_fatal = shutdown.on_fatal
        stack.callback(self._manager.close)
        self._steps = StepFeed(history, engine.call_on_engine_thread, engine.take_state, settings.max_step_watchers)
        operations = AdminOperations(shutdown, engine, recordings, pool, self._steps)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, operations.start_recording, "SIGUSR2")
        self._server = Server(self._manager, operations)
        services.on_worker = self._server.set_worker

    async def serve(self) -> None:
        """Serve until the shutdown has started, then stop serving."""
        engine, server = self._engine, self._server
        engine.start()
        self._stack.callback(_stop, engine, self._shutdown)
        await _load_adapters(self._manager.services.adapters)
        watchdog = Watchdog(
            engine.busy_seconds,
            server.health.set_live,
            limit_seconds=self._settings.watchdog_timeout_seconds,
            on_tick=lambda: server.set_worker(engine.worker_status),
        )
        watchdog.start()
        self._stack.callback(watchdog.stop)
        async with self._metrics_server(), self._status_server(), self._http_gateway(), self._traces():
            try:
                await self._run()
            finally:
                engine.release_worker()

    @contextlib.asynccontextmanager
    async def _metrics_server(self) -> AsyncIterator[None]:
        """Serve metrics for Prometheus, also during the shutdown, if an address is set."""
        address, manager, certificates = self._settings.metrics_listen, self._manager, self._server.certificates
        if not address:
            yield
            return
        loop = asyncio.get_running_loop()

        def collect() -> list[Metric]:
            return asyncio.run_coroutine_threadsafe(metrics_export.current(manager, certificates), loop).result(
                _METRICS_SECONDS
            )

        server = metrics_export.MetricsServer(address, collect)
        log.info("metrics_listening", address=server.address)
        try:
            yield
        finally:
            server.close()

    @contextlib.asynccontextmanager
    async def _status_server(self) -> AsyncIterator[None]:
        """Serve the status page, also during the shutdown, if an address is set."""
        settings, steps, certificates, tokens = self._settings, self._steps, self._server.certificates, None
        loop = asyncio.get_running_loop()
        if not settings.status_listen:
            yield
            return
        if settings.admin_token_file:
            path = Path(settings.admin_token_file)
            tokens = ReloadingFile([path], lambda: read_tokens(path))
        server = StatusServer(
            settings.status_listen,
            steps,
            tokens,
            settings.max_step_watchers,
            lambda: asyncio.run_coroutine_threadsafe(self._manager.status(), loop).result(_METRICS_SECONDS),
            certificates.context if certificates else None,
        )
        if certificates is None and not is_local(settings.status_listen):
            log.warning("insecure_listener", address=settings.status_listen, there_is="no encryption (--tls-cert-file)")
        log.info("status_page_listening", url=server.url)
        try:
            yield
        finally:
            steps.close()
            # Their threads do not keep the process alive.
            await asyncio.to_thread(steps.wait_until_idle, _STATUS_SECONDS)
            server.close()

    @contextlib.asynccontextmanager
    async def _http_gateway(self) -> AsyncIterator[None]:
        """Run the gateway over HTTP, also during the shutdown, if the settings ask for one."""
        if not self._settings.gateway:
            yield
            return
        from lineclear.scheduler.grpc_api.gateway.http_gateway import HttpGateway

        settings, is_console = self._settings, logging_setup.chosen(self._settings.log_format) == "console"
        address, parsers = self._server.gateway_address, self._manager.services.parsers
        gateway = HttpGateway(settings, address, parsers, shows_example=is_console)
        async with gateway.running():
            yield

    @contextlib.asynccontextmanager
    async def _traces(self) -> AsyncIterator[None]:
        """Send a span of each request, also during the shutdown, if the settings name a collector."""
        if not self._settings.otlp_traces_endpoint:
            yield
            return
        from lineclear.scheduler.tracing import Tracer

        tracer = Tracer(self._settings.otlp_traces_endpoint)
        self._manager.requests.on_ended = tracer.add
        try:
            yield
        finally:
            await asyncio.to_thread(tracer.close, _STATUS_SECONDS)

    async def _run(self) -> None:
        """Serve until the shutdown starts, then drain, or stop at once if it is forced."""
        settings, manager, server = self._settings, self._manager, self._server
        await server.start()
        await manager.services.tokenizers.prepare()
        if settings.batching_strategy == "fixed_size":
            log.warning(
                "fixed_size_waits",
                for_requests=settings.max_batch_size,
                at_most_seconds=settings.fixed_size_timeout_seconds,
                hint="fewer requests wait for their deadline unless --batch-timeout-ms is set",
            )
        log.info(
            "listening",
            address=server.address,
            admin_address=server.admin_address,
            health_address=server.health_address,
            gateway_address=server.gateway_address,
        )
        if settings.demo and logging_setup.chosen(settings.log_format) == "console":
            write_stderr(demo.commands(settings, server.address))
        # Objects made at start live as long as the process: collecting garbage among them would only pause all streams.
        gc.collect()
        gc.freeze()
        await self._shutdown.started.wait()
        self._pool.drain()
        if not await self._shutdown.run_unless_forced(self._shut_down()):
            manager.fail_all(shutdown_interrupted)
            await server.stop(0)

    async def _shut_down(self) -> None:
        """End readiness, refuse new requests, finish running ones within the drain timeout, close the listeners last.

        Until then, new calls get the reason of the refusal.
        """
        manager, server, exit_code = self._manager, self._server, self._shutdown.exit_code
        server.health.set_draining()
        linger = asyncio.ensure_future(asyncio.sleep(self._settings.drain_linger_seconds))
        if exit_code == ExitCode.OK:
            await manager.drain(self._settings.drain_timeout_seconds)
        else:
            error = _engine_failed(self._shutdown.failure) if exit_code == ExitCode.INTERNAL else _no_worker
            manager.refuse(error)
            manager.fail_all(lambda request: error())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                await manager.services.streams.wait_until_idle()
        await linger
        self._steps.close()  # only now: operators watch how a server drains
        await server.stop(_STATUS_SECONDS)


async def _load_adapters(adapters: Adapters) -> None:
    try:
        await adapters.load_at_start()
    except LineclearError as error:
        raise ConfigurationError(str(error)) from None


def _stop(engine: Engine, shutdown: ShutdownController) -> None:
    try:
        engine.stop()
    except EngineStuck:
        shutdown.exit_code = ExitCode.INTERNAL


def _on_rejected(fingerprint: str, shutdown: ShutdownController) -> Callable[[Hello], None]:
    """Return the callback that shuts down because a worker has read other tokenizer files than this process.

    The tokens of waiting requests and the text of running ones depend on the tokenizer, so it is not exchanged while
    serving. A new process reads the files again.
    """

    def on_rejected(hello: Hello) -> None:
        reason = (
            "the worker has read other tokenizer, chat template or generation_config files than the scheduler; "
            "give both the same model directory and start the scheduler again"
        )
        log.error("join_rejected", reason=reason, pid=hello.pid, theirs=hello.text_fingerprint, ours=fingerprint)
        shutdown.start_from_any_thread(ExitCode.MODEL_FILES_CHANGED, reason)

    return on_rejected


def _no_worker() -> WorkerUnavailable:
    return WorkerUnavailable(
        "there is no worker, and there will be none; the server is shutting down", retry_after_seconds=5.0
    )


def _engine_failed(failure: BaseException) -> Callable[[], LineclearError]:
    error = incident("scheduler", failure)
    return lambda: InternalError(str(error), metadata=error.metadata)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Replace asyncio's handler, which prints the text of exceptions: it may hold content."""
    error = context.get("exception")
    log.error("loop_error", problem=context["message"], **(exception_fields(error) if error is not None else {}))


def _core(settings: SchedulerSettings) -> tuple[Scheduler, RecordingFiles]:
    # A new secret for each process: cached prefixes cannot be guessed.
    limits = replace(settings.part(CoreLimits), cache_secret=secrets.token_bytes(32))
    core = RecordingScheduler(limits, settings.min_recorded_calls)
    directory = Path(settings.recording_directory) if settings.recording_directory else None
    return core, RecordingFiles(core, directory)


def _engine_limits(settings: SchedulerSettings, fingerprint: str) -> EngineLimits:
    return EngineLimits(
        settings.part(WorkerTimeouts),
        settings.max_workers,
        # A submit and a cancel for each request that can wait or run. More are unread only while the engine is stalled.
        max_inbox=2 * (settings.max_queue_size + settings.max_batch_size),
        text_fingerprint=fingerprint,
    )
