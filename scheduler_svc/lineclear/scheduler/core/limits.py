"""Who cannot join the queue: no room in it now, or a request that no worker like this one could ever run.

Decides nothing about who is next, and keeps nothing.
"""

from __future__ import annotations

from lineclear.errors import KvCapacityExceeded, ModelChanged, ModelReplaced, PromptTooLong, QueueFull
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import CoreLimits
from lineclear.wire.messages import Hello


def check_queue(request: Request, waiting: RequestQueue, limits: CoreLimits) -> None:
    """Raises QueueFull. A single request may be longer than all may be together."""
    if len(waiting) >= limits.max_queue_size:
        raise QueueFull(
            f"{len(waiting)} requests are waiting, the limit is {limits.max_queue_size}; retry later",
            retry_after_seconds=1.0,
            metadata={"waiting": str(len(waiting)), "limit": str(limits.max_queue_size)},
        )
    num_tokens = len(request.prompt) + len(request.output)
    if len(waiting) > 0 and waiting.num_tokens + num_tokens > limits.max_queue_tokens:
        raise QueueFull(
            f"{waiting.num_tokens} prompt tokens are waiting, the limit is {limits.max_queue_tokens}; retry later",
            retry_after_seconds=1.0,
            metadata={"waiting_tokens": str(waiting.num_tokens), "limit_tokens": str(limits.max_queue_tokens)},
        )


def check_model(request: Request, hello: Hello, began_on: str = "") -> None:
    """Raises ModelChanged for a request that began on another model (fingerprint `began_on`), or names another one.

    Raises ModelReplaced for one that has not begun, and was validated with other figures than the worker's.
    """
    wanted = request.model_fingerprint or began_on
    if wanted and wanted != hello.model_fingerprint:
        raise ModelChanged(
            f"the model is now {hello.model_fingerprint}, the request is for {wanted}; what was received of its answer "
            "is right for that model, and a whole answer of the new one needs a new request",
            metadata={"model_fingerprint": hello.model_fingerprint, "expected_model_fingerprint": wanted},
        )
    if request.vocabulary not in (None, (hello.vocab_size, hello.eos_token_ids)):
        raise ModelReplaced(
            "the model changed before the request began, and has other end-of-sequence tokens; send it again",
            retry_after_seconds=0.0,
            metadata={"model_fingerprint": hello.model_fingerprint},
        )


def check_capacity(request: Request, hello: Hello) -> None:
    """Raises PromptTooLong or CannotFit for a request that the worker could never run, even alone."""
    total = len(request.prompt) + request.max_tokens
    if total > hello.max_model_len:
        raise PromptTooLong(
            f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} exceed the context of "
            f"{hello.max_model_len}",
            metadata={"prompt_tokens": str(len(request.prompt)), "context_length": str(hello.max_model_len)},
        )
    need = -(-(total - 1) // hello.block_size)
    if need > hello.num_blocks:
        raise KvCapacityExceeded(
            f"the request needs {need} KV blocks, the pool has {hello.num_blocks}",
            metadata={"need": str(need), "have": str(hello.num_blocks)},
        )
