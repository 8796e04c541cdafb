"""The core's limits from the settings, for the server and for the capacity planner."""

from __future__ import annotations

import secrets

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.requests import settings_limits
from lineclear.scheduler.settings import SchedulerSettings

_DRAFT_MODEL = 1.0, 0.9
"""A draft model always has drafts, and usually good ones: a trial of few drafts would not pay for the row."""


def core_limits(settings: SchedulerSettings) -> CoreLimits:
    """Return the core's limits of `settings`, with a new secret for prefix-cache keys."""
    return CoreLimits(
        **settings_limits.core_limits(settings),
        pipeline_depth=settings.pipeline_depth,
        max_preemptions=settings.max_preemptions,
        max_queue_overtakes=settings.max_queue_overtakes,
        max_isolated_crashes=settings.max_isolated_crashes,
        # A request runs alone after two crashes, and those count towards max_worker_crashes as well.
        max_isolated_kills=max(1, settings.max_worker_crashes - 2),
        reject_unmeetable_deadlines=settings.reject_unmeetable_deadlines,
        prefix_cache=settings.prefix_cache,
        max_loras=settings.max_loras,
        adaptive_drafts=settings.speculative_adaptive,
        expected_drafts=_DRAFT_MODEL if settings.speculative_method == "draft_model" else None,
        cache_secret=secrets.token_bytes(32),  # new for each process: cached prefixes cannot be guessed
    )
