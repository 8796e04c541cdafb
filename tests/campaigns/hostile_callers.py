"""Hostile clients, one kind a function. `campaigns.hostile` runs each in its own processes.

python -m campaigns.hostile_callers KIND DATA_PORT HEALTH_PORT METRICS_PORT STATUS_PORT SECONDS

Prints the number of attempts and the status codes as JSON. Errors are expected: the server refuses and disconnects.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from campaigns import hostile_frames, hostile_requests, hostile_services
from campaigns.hostile_target import Target, outcomes

SERVED = frozenset(
    {
        *("ambiguous_grammars", "lexer_heavy_forms", "slow_forms", "embed_flood"),
        *("score_flood", "template_flood", "detokenize_flood", "tokenize_flood"),
        *("resume_flood", "unread_answers", "stats_flood", "beam_searches"),
        *("repetition_penalties", "stop_regexes", "tool_lists"),
    }
)
"""Kinds that prove nothing unless some of their calls succeed."""

KINDS: dict[str, Callable[[Target], int]] = hostile_requests.REPEATED | {
    kind.__name__: kind
    for kind in (
        hostile_services.busy_neighbours,
        hostile_services.ordinary_streams,
        hostile_services.unread_status_streams,
        hostile_services.stats_flood,
        hostile_services.watch_flood,
        hostile_services.idle_sessions,
        hostile_services.slow_scrapers,
        hostile_requests.cancel_storm,
        hostile_requests.resume_flood,
        hostile_requests.form_flood,
        hostile_requests.slow_forms,
        hostile_requests.embed_flood,
        hostile_requests.score_flood,
        hostile_requests.heavy_requests,
        hostile_requests.oversized_requests,
        hostile_requests.repetition_penalties,
        hostile_frames.unfinished_requests,
        hostile_frames.frames_of_pings,
        hostile_frames.frames_of_settings,
        hostile_frames.frames_of_empty_data,
        hostile_frames.frames_of_continuations,
        hostile_frames.frames_of_resets,
    )
}


def main() -> None:
    """Run one kind for the given seconds."""
    kind, *numbers = sys.argv[1:]
    *ports, seconds = numbers
    target = Target(*map(int, ports), end=time.monotonic() + float(seconds))
    times = KINDS[kind](target)
    print(json.dumps({"times": times, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
