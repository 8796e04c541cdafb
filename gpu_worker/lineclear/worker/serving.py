"""A worker from its flags to its exit code. Decides in which order it comes up: settings, model, runner, loop."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from lineclear import logs
from lineclear.sockets import SocketError

from . import host
from .loop import Exit, LoopLimits, run
from .settings import ConfigurationError, WorkerSettings, load

log = structlog.get_logger()


def serve(argv: Sequence[str], supervised: bool) -> int:
    """Run a worker until it is told to stop; the exit code (see `loop.Exit`)."""
    try:
        settings = load(argv)
    except ConfigurationError as error:
        print(f"lineclear-worker: {error}", file=sys.stderr)
        return Exit.CONFIGURATION
    writer = logs.configure("worker", settings.log_level, settings.log_format)
    try:
        return _serve(settings, supervised)
    finally:
        writer.close()


def _serve(settings: WorkerSettings, supervised: bool) -> int:
    # torch reads it when it is imported: memory for KV pools and activations in huge pages where they are lent.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    host.bound_spinning()
    # Nearly all that these imports make stays. Looking through it for garbage, again and again while it grows, took a
    # fifth of their time; frozen, it is not looked through later either.
    gc.disable()
    from .golden import SelfTestFailed
    from .kernels import NONE, library_name
    from .model import ModelFilesChanged, ModelRefused
    from .start import make_runner

    gc.freeze()
    gc.enable()
    for_people = logs.chosen(settings.log_format) == "console"
    log.info("worker_starting", **settings.model_dump(mode="json", exclude_defaults=for_people))
    began_at = time.monotonic()
    try:
        runner = make_runner(settings)
    except (ModelRefused, ConfigurationError) as error:
        log.error("model_refused", reason=str(error))
        return Exit.CONFIGURATION
    except SelfTestFailed as error:
        log.error("self_test_failed", reason=str(error))
        return Exit.BROKEN
    except ModelFilesChanged as error:
        log.error("model_files_changed", reason=str(error))
        return Exit.BROKEN
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
        native_kernels=library_name() or NONE,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=hello.max_model_len,
    )
    log.info("host", cores=host.usable_cores(), allocator=host.allocator(), huge_pages=host.huge_pages())
    # What loading left behind stays; looking through it again and again for garbage would make steps wait.
    gc.collect()
    gc.freeze()
    try:
        limits = LoopLimits(drain_timeout_seconds=settings.drain_timeout_seconds)
        return run(runner, Path(settings.directory), supervised=supervised, limits=limits)
    except SocketError as error:
        log.error("sockets_refused", reason=str(error))
        return Exit.CONFIGURATION
