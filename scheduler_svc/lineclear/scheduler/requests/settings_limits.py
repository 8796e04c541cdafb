"""Build the limits of the request layer from the settings."""

from __future__ import annotations

from lineclear.scheduler.requests.detached import DetachedLimits
from lineclear.scheduler.requests.queue_limits import QueueLimits
from lineclear.scheduler.requests.tokenizer_pool import TextLimits
from lineclear.scheduler.settings import SchedulerSettings


def text_limits(settings: SchedulerSettings) -> TextLimits:
    """Return the limits of the tokenizer pool."""
    return TextLimits(
        threads=settings.tokenizer_threads,
        max_busy=settings.max_tokenizer_queue_size,
        max_conversations=settings.max_queue_size,
        template_processes=settings.chat_template_processes,
        template_seconds=settings.max_chat_template_seconds,
        max_prompt_bytes=settings.max_prompt_bytes,
    )


def quota_limits(settings: SchedulerSettings) -> QueueLimits:
    """Return the limits of the request queue."""
    return QueueLimits(
        requests=settings.max_queue_size,
        tokens=settings.max_queue_tokens,
        requests_per_tenant=settings.max_queue_size_per_tenant,
        tokens_per_tenant=settings.max_queue_tokens_per_tenant,
        reject_unmeetable_deadlines=settings.reject_unmeetable_deadlines,
    )


def detached_limits(settings: SchedulerSettings) -> DetachedLimits:
    """Return the limits of submitted requests."""
    return DetachedLimits(
        answers=settings.max_detached,
        tokens=settings.max_detached_tokens,
        num_bytes=settings.max_detached_bytes,
        answers_per_tenant=settings.max_detached_per_tenant,
        ttl_seconds=settings.detached_ttl_seconds,
    )
