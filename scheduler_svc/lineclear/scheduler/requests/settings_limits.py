"""Build the limits of the request layer from the settings."""

from __future__ import annotations

from typing import Any

from lineclear.scheduler.core.policies import PolicySettings
from lineclear.scheduler.requests.grammar_pool import GrammarLimits
from lineclear.scheduler.requests.queue_limits import QueueLimits
from lineclear.scheduler.requests.submitted_requests import SubmittedLimits
from lineclear.scheduler.requests.tokenizer_pool import TextLimits
from lineclear.scheduler.security import identity
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
    )


def core_limits(settings: SchedulerSettings) -> dict[str, Any]:
    """Return the fields of CoreLimits that may change while the server runs."""
    return {
        "max_batch_size": settings.max_batch_size,
        "target_batch_tokens": settings.target_batch_tokens,
        "max_queue_size": settings.max_queue_size,
        "max_queue_tokens": settings.max_queue_tokens,
        "batching_strategy": settings.batching_strategy,
        "scheduling_policy": settings.scheduling_policy,
        "preemption_policy": settings.preemption_policy,
        "policy": PolicySettings(
            min_batch_size=settings.min_batch_size,
            batch_timeout_seconds=settings.batch_timeout_ms / 1000,
            priority_aging_seconds=settings.priority_aging_seconds,
            target_inter_token_latency_seconds=settings.target_inter_token_latency_ms / 1000,
            max_prefill_slowdown=settings.max_prefill_slowdown,
            fixed_size_timeout_seconds=fixed_size_timeout_seconds(settings),
            share_weights={identity.share(name): weight for name, weight in settings.weights.items()},
        ),
    }


def fixed_size_timeout_seconds(settings: SchedulerSettings) -> float | None:
    """Return the timeout of fixed_size only if it is set: its default would turn fixed_size into another strategy."""
    return settings.batch_timeout_ms / 1000 if "batch_timeout_ms" in settings.model_fields_set else None


def grammar_limits(settings: SchedulerSettings) -> GrammarLimits:
    """Return the limits of structured output."""
    return GrammarLimits(
        processes=settings.grammar_processes,
        cpu_seconds=settings.max_grammar_seconds,
        max_bytes=settings.max_grammar_bytes,
        max_depth=settings.max_grammar_depth,
        max_cached=settings.max_cached_grammars,
        max_waiting=settings.max_queue_size,
    )


def submitted_limits(settings: SchedulerSettings) -> SubmittedLimits:
    """Return the limits of submitted requests."""
    return SubmittedLimits(
        answers=settings.max_submitted,
        tokens=settings.max_submitted_tokens,
        num_bytes=settings.max_submitted_bytes,
        answers_per_tenant=settings.max_submitted_per_tenant,
        ttl_seconds=settings.submitted_ttl_seconds,
    )
