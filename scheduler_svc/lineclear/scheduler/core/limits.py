"""The core's limits, and the checks of a request against the queue and against the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from lineclear.errors import (
    DeadlineUnreachable,
    KvCapacityExceeded,
    ModelChanged,
    ModelReplaced,
    PromptTooLong,
    QueueFull,
)
from lineclear.scheduler.core.events import QueuePosition
from lineclear.scheduler.core.policies import PolicySettings
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Hello

SWITCHABLE = frozenset(
    {
        *("max_batch_size", "target_batch_tokens", "max_queue_size", "max_queue_tokens"),
        *("batching_strategy", "scheduling_policy", "preemption_policy", "policy"),
    }
)
"""The fields of CoreLimits that may change while the core serves."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 60.0
MAX_SPEEDUP = 3.0
"""How much sooner than predicted a request may start, as answers may be shorter than expected."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """The bounds that the core keeps and the policies it follows. Names and meaning: docs/configuration.md."""

    max_batch_size: int = 64
    target_batch_tokens: int = 0  # 0: as many as the worker takes
    pipeline_depth: int = 2
    max_queue_size: int = 1024
    max_queue_tokens: int = 1_000_000
    max_preemptions: int = 4
    max_queue_overtakes: int = 16
    max_isolated_crashes: int = 1
    max_isolated_kills: int = 3
    reject_unmeetable_deadlines: bool = False
    prefix_cache: bool = True
    max_loras: int = 8
    adaptive_drafts: bool = True  # False: as many drafts as requests allow, also where they gain nothing
    speculative_method: str = "none"  # compared with the workers that join
    cache_secret: bytes = b""
    batching_strategy: str = "continuous"
    scheduling_policy: str = "fifo"
    preemption_policy: str = "cheapest"
    policy: PolicySettings = field(default_factory=PolicySettings)

    @property
    def order(self) -> tuple[str, float, Mapping[str, float]]:
        """The settings that queue keys depend on."""
        return self.scheduling_policy, self.policy.priority_aging_seconds, self.policy.share_weights

    def differences(self, other: CoreLimits) -> list[str]:
        """Return the names of the fields that differ."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


def check_queue(
    request: Request, waiting: RequestQueue, limits: CoreLimits, predicted_wait: Callable[[], float | None]
) -> None:
    """Raises QueueFull. An empty queue takes any one request, even one over `max_queue_tokens`, and any sibling.

    `predicted_wait()` is that of a request at the end of the queue.
    """
    if request.is_sibling:
        return
    if waiting.num_places >= limits.max_queue_size:
        figures = {"waiting": waiting.num_places, "limit": limits.max_queue_size}
        raise queue_full(f"{waiting.num_places} requests are waiting", limits.max_queue_size, figures, predicted_wait())
    num_tokens = len(request.prompt) + len(request.output)
    if waiting.num_places > 0 and waiting.place_tokens + num_tokens > limits.max_queue_tokens:
        message = f"{waiting.place_tokens} prompt tokens are waiting"
        figures = {"waiting_tokens": waiting.place_tokens, "limit_tokens": limits.max_queue_tokens}
        raise queue_full(message, limits.max_queue_tokens, figures, predicted_wait())


def queue_full(
    message: str, limit: int, figures: Mapping[str, int], predicted_wait: float | None, retry_seconds: float = 1.0
) -> QueueFull:
    """Return the error of a full queue. `retry_seconds` is the retry hint where no wait is predicted.

    A retry after half of the wait finds free places before the queue is empty.
    """
    metadata = {name: str(figure) for name, figure in figures.items()}
    if predicted_wait is not None:
        metadata["predicted_wait_seconds"] = f"{predicted_wait:.3f}"
        retry_seconds = min(max(predicted_wait / 2, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
    sentence = f"{message}, the limit is {limit}; retry in about {retry_seconds:.1f} s"
    return QueueFull(sentence, retry_after_seconds=retry_seconds, metadata=metadata)


def check_deadline(request: Request, place: QueuePosition, num_slots: int, now: float) -> None:
    """Raises DeadlineUnreachable if the deadline passes in the queue even at MAX_SPEEDUP times the predicted pace.

    With fewer requests ahead than slots nothing is raised: any running request may end in the next step.
    """
    if request.deadline is None or not place.seconds or place.requests_ahead < num_slots:
        return
    least = place.seconds / MAX_SPEEDUP
    if now + least > request.deadline:
        raise DeadlineUnreachable(
            f"{place.requests_ahead} requests are ahead; the deadline, in {request.deadline - now:.1f} s, would "
            f"pass in the queue, which takes {least:.1f} s at least",
            metadata={"requests_ahead": str(place.requests_ahead), "least_wait_seconds": f"{least:.3f}"},
        )


def check_model(request: Request, hello: Hello, started_on: str = "") -> None:
    """Raises ModelChanged if the request started on another model (fingerprint `started_on`) or names another one.

    Raises ModelReplaced if it has not started and was validated with another vocabulary than the worker's.
    """
    wanted = request.model_fingerprint or started_on
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
    """Raises PromptTooLong or KvCapacityExceeded for a request that the worker cannot run even alone."""
    total = request.max_len
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
