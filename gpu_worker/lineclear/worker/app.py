"""Starts a worker: settings, imports, model, step loop, exit code."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from lineclear.exit_codes import ExitCode
from lineclear.model_files import model_directory
from lineclear.model_files.model_directory import NotServable
from lineclear.process import logging_setup
from lineclear.process.private_dir import PathError
from lineclear.process.settings_base import ConfigurationError
from lineclear.process.standard_error import write_stderr
from lineclear.process.standby import Standby
from lineclear.wire.messages import Hello

from .device import host_info
from .loop.step_loop import LoopLimits, run
from .settings import WorkerSettings, load

if TYPE_CHECKING:
    from .tensor_parallel.ranks import Ranks

log = structlog.get_logger()


def serve(argv: Sequence[str], supervised: bool, standby: Standby | None = None) -> int:
    """Run a worker until it is stopped; return the exit code. A standby first waits to be promoted."""
    try:
        settings = load(argv)
    except ConfigurationError as error:
        write_stderr(f"lineclear-worker: {error}")
        return ExitCode.CONFIGURATION
    writer = logging_setup.configure("worker", settings.log_level, settings.log_format)
    # torch reads this when it is imported: memory for KV pools and activations in huge pages, where the system allows.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        if standby is not None:
            standby.run_in_background(lambda: _prepare(settings))
            argv = [*argv, *standby.wait_until_promoted()]  # of the worker that it replaces
            settings = load(argv)
        return _serve(settings, argv, supervised)
    finally:
        writer.close()


def _serve(settings: WorkerSettings, argv: Sequence[str], supervised: bool) -> int:
    started_at = time.monotonic()
    try:  # before torch is imported, which takes seconds
        _check_models(settings)
    except NotServable as error:
        log.error("model_refused", reason=settings.named(str(error)))
        return ExitCode.CONFIGURATION
    if settings.tensor_parallel_size == 1:
        return _run(settings, supervised, started_at)
    from .tensor_parallel.ranks import Ranks, part_of  # here, so that other workers do not pay for it

    command = [sys.executable, "-P", "-m", "lineclear.worker.main", *argv]
    ranks = Ranks.join(settings.tensor_parallel_size, command)  # they import torch at the same time
    if ranks.rank:
        logging_setup.set_level("error")  # rank 0 reports for all
    try:
        return _run(part_of(settings, ranks.rank, ranks.count), supervised, started_at, ranks)
    finally:
        ranks.close()


def _run(settings: WorkerSettings, supervised: bool, started_at: float, ranks: Ranks | None = None) -> int:
    with _importing():
        from .model.loaded_model import ModelFilesChanged, ModelRefused
        from .runner.runner_factory import make_runner
        from .runner.self_test import SelfTestFailed
        from .runner.step_recorder import TorchStepRecorder

    is_console = logging_setup.chosen(settings.log_format) == "console"
    log.info("worker_starting", **settings.model_dump(mode="json", exclude_defaults=is_console))
    try:
        runner = make_runner(settings, ranks)
    except (ModelRefused, ConfigurationError) as error:
        log.error("model_refused", reason=settings.named(str(error)))
        return ExitCode.CONFIGURATION
    except SelfTestFailed as error:
        log.error("self_test_failed", reason=str(error))
        return ExitCode.INTERNAL
    except ModelFilesChanged as error:
        log.error("model_files_changed", reason=str(error))
        return ExitCode.INTERNAL
    if ranks is not None and ranks.rank:
        from .runner.rank_runner import follow

        return follow(runner, ranks)
    runner.load_seconds = time.monotonic() - started_at
    _log_loaded(runner.hello(0))
    # Objects made while loading stay. Frozen, the garbage collector does not scan them again during steps.
    gc.collect()
    gc.freeze()
    try:
        limits = LoopLimits(drain_timeout_seconds=settings.drain_timeout_seconds)
        directory = Path(settings.socket_directory)
        return run(runner, directory, supervised=supervised, limits=limits, make_recorder=TorchStepRecorder)
    except PathError as error:
        log.error("sockets_refused", reason=str(error))
        return ExitCode.CONFIGURATION


def _log_loaded(hello: Hello) -> None:
    from .kernels.native_library import NONE, library_name

    log.info(
        "model_loaded",
        seconds=round(hello.load_seconds, 3),
        model_id=hello.model_id,
        model_fingerprint=hello.model_fingerprint,
        family=hello.family,
        device=hello.device,
        dtype=hello.dtype,
        attention_backend=hello.attention_backend,
        forward_pass=hello.forward_pass,
        forward_pass_reason=hello.forward_pass_reason,
        cpu_kernels=library_name() or NONE,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=hello.max_model_len,
        weight_bytes=hello.weight_bytes,
        kv_cache_bytes=hello.kv_cache_bytes,
        step_memory_bytes=hello.step_memory_bytes,
    )
    cores, allocator, huge_pages = host_info.usable_cores(), host_info.allocator(), host_info.huge_pages()
    log.info("host_info", cores=cores, allocator=allocator, huge_pages=huge_pages)


def _check_models(settings: WorkerSettings) -> None:
    for flag, model in (("--model", settings.model), ("--draft-model", settings.draft_model)):
        if model:
            model_directory.check(model, model_directory.locate(model, flag), flag)


@contextmanager
def _importing() -> Iterator[None]:
    """Import torch and the modules that use it without garbage collection.

    Nearly all objects that these imports make stay. Collections took a fifth of the import time; frozen objects are not
    scanned later either.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def _prepare(settings: WorkerSettings) -> None:
    """Do the work of a standby that needs no weights."""
    with _importing():
        from .runner.runner_factory import warm_up
    warm_up(settings)
