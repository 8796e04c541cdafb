"""The log lines of a worker that joins: what it is, and which limits of the scheduler its own are below."""

from __future__ import annotations

import structlog

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.wire.messages import Hello

log = structlog.get_logger()


def log_join(hello: Hello, limits: CoreLimits) -> None:
    """Log the worker, and each limit that a step of it does not reach: a step is held to the smaller one."""
    log.info(
        "worker_joined",
        epoch=hello.epoch,
        pid=hello.pid,
        model_id=hello.model_id,
        device=hello.device,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        num_slots=hello.num_slots,
    )
    caps = (
        ("--max-batch-size", limits.max_batch_size, hello.num_slots),
        ("--target-batch-tokens", limits.target_batch_tokens, hello.max_step_tokens),
    )
    if limits.wants_draft_model != bool(hello.draft_model):
        hint = (
            "drafts come from the request's own text; start the worker with --draft-model DIR"
            if limits.wants_draft_model
            else f"the worker holds {hello.draft_model}; start the scheduler with --speculative-method draft_model"
        )
        log.warning("worker_differs_in_drafts", pid=hello.pid, draft_model=hello.draft_model, hint=hint)
    for flag, asked, has in caps:
        if asked > has:
            hint = f"start the worker with {flag} {asked}, or lower the scheduler's"
            log.warning("worker_caps_batches", flag=flag, value=asked, worker_value=has, hint=hint)
