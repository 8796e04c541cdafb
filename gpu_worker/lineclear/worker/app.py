"""A worker from its flags to its exit code. Decides in which order it comes up: settings, model, runner, loop."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from lineclear.exit_codes import ExitCode
from lineclear.process import logging_setup
from lineclear.process.settings_base import ConfigurationError
from lineclear.process.socket_dir import SocketError
from lineclear.process.standby import Standby

from . import host_info
from .settings import WorkerSettings, load
from .step_loop import LoopLimits, run

log = structlog.get_logger()


def serve(argv: Sequence[str], supervised: bool, standby: Standby | None = None) -> int:
    """Run a worker until it is told to stop; the exit code (see `exit_codes`). A standby waits to be promoted first."""
    try:
        settings = load(argv)
    except ConfigurationError as error:
        logging_setup.write_stderr(f"lineclear-worker: {error}")
        return ExitCode.CONFIGURATION
    writer = logging_setup.configure("worker", settings.log_level, settings.log_format)
    try:
        return _serve(settings, supervised, standby)
    finally:
        writer.close()


def _serve(settings: WorkerSettings, supervised: bool, standby: Standby | None) -> int:
    # torch reads it when it is imported: memory for KV pools and activations in huge pages where they are lent.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if standby is not None:
        standby.run_in_background(lambda: _prepare(settings))
        standby.wait_until_promoted()
    imported = _import()
    for_people = logging_setup.chosen(settings.log_format) == "console"
    log.info("worker_starting", **settings.model_dump(mode="json", exclude_defaults=for_people))
    began_at = time.monotonic()
    try:
        runner = imported.make_runner(settings)
    except imported.refusals as error:
        log.error("model_refused", reason=settings.named(str(error)))
        return ExitCode.CONFIGURATION
    except imported.self_test_failed as error:
        log.error("self_test_failed", reason=str(error))
        return ExitCode.INTERNAL
    except imported.model_files_changed as error:
        log.error("model_files_changed", reason=str(error))
        return ExitCode.INTERNAL
    hello = runner.hello(0)
    log.info(
        "model_loaded",
        seconds=round(time.monotonic() - began_at, 3),
        model_id=hello.model_id,
        model_fingerprint=hello.model_fingerprint,
        family=hello.family,
        device=hello.device,
        dtype=hello.dtype,
        attention_backend=hello.attention_backend,
        cpu_kernels=imported.kernels_name() or imported.no_kernels,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=hello.max_model_len,
    )
    log.info("host", cores=host_info.usable_cores(), allocator=host_info.allocator(), huge_pages=host_info.huge_pages())
    # What loading left behind stays; looking through it again and again for garbage would make steps wait.
    gc.collect()
    gc.freeze()
    try:
        limits = LoopLimits(drain_timeout_seconds=settings.drain_timeout_seconds)
        return run(runner, Path(settings.socket_directory), supervised=supervised, limits=limits)
    except SocketError as error:
        log.error("sockets_refused", reason=str(error))
        return ExitCode.CONFIGURATION


class _Imported(NamedTuple):
    """What takes long to import."""

    make_runner: Callable[[WorkerSettings], Any]
    refusals: tuple[type[Exception], ...]
    self_test_failed: type[Exception]
    model_files_changed: type[Exception]
    kernels_name: Callable[[], str | None]
    no_kernels: str


def _import() -> _Imported:
    """Import what loading and serving take."""
    # Nearly all that these imports make stays. Looking through it for garbage, again and again while it grows, took a
    # fifth of their time; frozen, it is not looked through later either.
    gc.disable()
    from .kernels import NONE, library_name
    from .model.loaded_model import ModelFilesChanged, ModelRefused
    from .runner_factory import make_runner
    from .self_test import SelfTestFailed

    gc.freeze()
    gc.enable()
    return _Imported(
        make_runner, (ModelRefused, ConfigurationError), SelfTestFailed, ModelFilesChanged, library_name, NONE
    )


def _prepare(settings: WorkerSettings) -> None:
    """Do what a standby can do without the model's weights."""
    _import()
    from .runner_factory import warm_up

    warm_up(settings)
