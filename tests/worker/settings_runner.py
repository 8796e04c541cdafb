"""Runners made as a worker makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lineclear.worker.runner.model_runner import ModelRunner
from lineclear.worker.runner.runner_factory import make_runner
from lineclear.worker.settings import WorkerSettings


def runner_with(model: Path, **flags: Any) -> ModelRunner:
    """Return the runner of a worker that serves `model` on the CPU with these settings."""
    fixed = {"model": str(model), "socket_directory": "unused", "num_blocks": 64, "device": "cpu", "threads": 1}
    return make_runner(WorkerSettings(**fixed | flags))
