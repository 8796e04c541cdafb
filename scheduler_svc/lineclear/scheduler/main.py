"""The scheduler process: settings, worker process, exit code.

The worker takes longest to start, because it imports torch. So this module imports only what starting it needs, and
imports `app` while the worker imports. Wrong settings, unusable files and addresses in use are reported before the
worker starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import structlog
import uvloop

from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command, is_installed
from lineclear.model_files import model_directory
from lineclear.model_files.model_directory import NotServable
from lineclear.process import core_dumps, logging_setup
from lineclear.process.device_names import split_devices
from lineclear.process.private_dir import PathError, private_directory
from lineclear.process.setting_fields import flag_of
from lineclear.process.settings_base import ConfigurationError
from lineclear.process.standard_error import open_closed_streams, write_stderr
from lineclear.scheduler import demo
from lineclear.scheduler.addresses import check_bindable
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_supervisor import GiveUpReason, SupervisorLimits
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.scheduler.settings import SchedulerSettings, load
from lineclear.scheduler.shutdown import ExitGuard, ShutdownController

log = structlog.get_logger()

_WORKER_DRAIN_MARGIN_SECONDS = 10.0
_EXIT_SECONDS = 30.0  # for engine, threads and sockets, once the worker is gone
_WITHOUT_WORKER = {
    GiveUpReason.CRASHES: ExitCode.NO_WORKER,
    GiveUpReason.CONFIGURATION: ExitCode.WORKER_CONFIGURATION,
    GiveUpReason.STUCK: ExitCode.WORKER_STUCK,
    GiveUpReason.BUG: ExitCode.INTERNAL,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scheduler until it is shut down, or replay a recording. Returns the exit code."""
    open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["replay"]:
        from lineclear.scheduler.flight_recorder import replay

        return replay.main(arguments[1:])
    _limit_arenas()  # before other threads start
    core_dumps.disable()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        settings, worker_flags = load(arguments)
    except ConfigurationError as error:
        write_stderr(f"lineclear-scheduler: {error}")
        return ExitCode.CONFIGURATION
    writer = logging_setup.configure("scheduler", settings.log_level, settings.log_format)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or gRPC writes unstructured lines into the log
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(demo.with_addresses(settings), worker_flags))
    except (ConfigurationError, NotServable, PathError) as error:
        log.error("configuration_error", problem=settings.named(str(error)))
        return ExitCode.CONFIGURATION
    finally:
        writer.close()


async def _serve(settings: SchedulerSettings, worker_flags: Sequence[str]) -> int:
    shown = settings.model_dump(exclude_defaults=logging_setup.chosen(settings.log_format) == "console")
    log.info("settings", version=version("lineclear"), pid=os.getpid(), **shown)
    shutdown, guard = ShutdownController(), ExitGuard(_EXIT_SECONDS)
    shutdown.handle_signals()
    if settings.exit_on_stdin_close:
        shutdown.watch_standard_input()
    model = _model(settings)
    _check_addresses(settings)
    _check_files(settings)
    with _socket_directory(settings) as directory, contextlib.ExitStack() as stack:
        link = WorkerLink(directory, max_plans_in_flight=settings.pipeline_depth)
        stack.callback(link.close)
        drain_seconds = settings.drain_timeout_seconds + _WORKER_DRAIN_MARGIN_SECONDS
        pool = WorkerPool(
            _worker_command(settings, model, directory, worker_flags),
            limits=replace(settings.part(SupervisorLimits), drain_timeout_seconds=drain_seconds),
            flags=_placements(settings),
            standby=settings.standby_worker,
            on_give_up=lambda reason: shutdown.start(_WITHOUT_WORKER[pool.given_up or GiveUpReason.BUG], reason),
        )
        try:
            if settings.spawn_worker:
                _check_models(settings, model)
                pool.start()
            from lineclear.scheduler.app import App

            await App(settings, model, shutdown, link, pool, stack).serve()
        finally:
            if settings.spawn_worker:
                # Before the engine stops, which releases the worker. A forced shutdown does not wait for the worker: it
                # ends with this process (see process/parent_death.py).
                await shutdown.run_unless_forced(pool.stop(kill=shutdown.exit_code != ExitCode.OK))
            guard.start()
    log.info("stopped", exit_code=int(shutdown.exit_code))
    return shutdown.exit_code


def _check_models(settings: SchedulerSettings, model: Path) -> None:
    if not settings.worker_command:  # another worker program may need no weights
        model_directory.check(settings.model or "--demo", model)
        if settings.draft_model:
            draft = model_directory.locate(settings.draft_model, "--draft-model")
            model_directory.check(settings.draft_model, draft, "--draft-model")
    model_directory.check_tokenizer(settings.model or "--demo", model)


def _model(settings: SchedulerSettings) -> Path:
    if settings.demo:
        return demo.model_directory()
    if not settings.model:
        raise ConfigurationError("no model is named; use --model DIR, or --demo")
    directory = model_directory.locate(settings.model)
    model_directory.check(settings.model, directory, is_loaded_here=False)
    return directory


def _check_packages(settings: SchedulerSettings) -> None:
    """Raise ConfigurationError for a package of an extra that the settings need and that is not there."""
    for flag, is_needed, package, extra in (
        ("--gateway", settings.gateway, "smg", "gateway"),
        ("--gateway-listen", settings.gateway or settings.gateway_listen, "smg-grpc-proto", "gateway"),
        ("--otlp-traces-endpoint", settings.otlp_traces_endpoint, "opentelemetry-exporter-otlp-proto-grpc", "tracing"),
    ):
        if is_needed and not is_installed(package):
            raise ConfigurationError(
                f"{flag} needs the package {package}, which is not installed; {install_command(extra)}"
            )


def _check_addresses(settings: SchedulerSettings) -> None:
    settings_of_addresses = ["listen", "admin_listen", "health_listen", "metrics_listen", "status_listen"]
    settings_of_addresses += ["gateway_listen", *["gateway_http"] * settings.gateway]
    for setting in settings_of_addresses:
        if address := getattr(settings, setting):
            try:
                check_bindable(address)
            except ConfigurationError as error:
                raise ConfigurationError(f"{flag_of(setting)}: {error}") from None


def _check_files(settings: SchedulerSettings) -> None:
    """Raise ConfigurationError or PathError for what the service would miss later, or only when it needs it."""
    _check_packages(settings)
    if settings.lora_dir and not Path(settings.lora_dir).is_dir():
        raise ConfigurationError(f"--lora-dir {settings.lora_dir} is not a directory")
    if settings.recording_directory:
        private_directory(Path(settings.recording_directory), "recording directory", parents=True)
    if settings.tls_cert_file:
        from lineclear.scheduler.security import tls  # imports grpc

        tls.read_certificates(settings)
    for setting in ("token_file", "admin_token_file"):
        if path := getattr(settings, setting):
            try:
                read_tokens(Path(path))
            except ConfigurationError as error:
                raise ConfigurationError(f"{flag_of(setting)}: {error}") from None


@contextlib.contextmanager
def _socket_directory(settings: SchedulerSettings) -> Iterator[Path]:
    """Yield the directory of the settings, or a private one that is removed at the end."""
    if settings.socket_directory:
        yield Path(settings.socket_directory)
        return
    if not settings.spawn_worker:
        raise ConfigurationError(
            "a worker that another program starts needs the sockets' directory; give --socket-directory, or"
            " --spawn-worker to start a worker here"
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
    """Return the worker's command line. The flags after `--` come last, so they override shared settings."""
    shared = settings.model_dump(include={"max_batch_size", "target_batch_tokens", "log_level"}) | {
        "model": model,
        "socket_directory": directory,
        # Longer than the scheduler's: a service manager may send SIGTERM to both processes at once.
        "drain_timeout_seconds": settings.drain_timeout_seconds + _WORKER_DRAIN_MARGIN_SECONDS,
        "log_format": logging_setup.chosen(settings.log_format),  # both write to the same standard error
    }
    if settings.draft_model:
        shared["draft_model"] = settings.draft_model
    command = shlex.split(settings.worker_command) or [sys.executable, "-P", "-m", "lineclear.worker.main"]
    return [*command, *(f"{flag_of(name)}={value}" for name, value in shared.items()), *worker_flags]


def _placements(settings: SchedulerSettings) -> list[list[str]]:
    """Return the flags that place each worker: its device, and its part of the machine, or of the GPU that it names."""
    count, devices = settings.worker_count, split_devices(settings.worker_devices)
    flags = []
    for number in range(count):
        device, share = [f"--device={name}" for name in devices[number : number + 1]], (number, count)
        if devices and devices[number].startswith("cuda:"):
            share = devices[:number].count(devices[number]), devices.count(devices[number])
        flags.append([*([f"--machine-share={share[0]}/{share[1]}"] if share[1] > 1 else []), *device])
    return flags


_M_ARENA_MAX = -8  # malloc.h of glibc
_MAX_ARENAS = 2  # one thread runs Python at a time, and gRPC's threads may allocate beside it


def _limit_arenas() -> None:
    """Limit glibc's arenas for the threads that start later. Other C libraries have none, and no `mallopt`.

    By default there are up to eight arenas for each processor, and each keeps what the peak of its threads needed.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)


if __name__ == "__main__":
    sys.exit(main())
