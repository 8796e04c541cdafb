"""Hostile clients, one kind a function. `campaigns.hostile` runs each in its own processes.

python -m campaigns.hostile_callers KIND DATA_PORT HEALTH_PORT METRICS_PORT STATUS_PORT SECONDS

Prints the number of attempts and the status codes as JSON. Errors are expected: the server refuses and disconnects.
"""

from __future__ import annotations

import json
import sys
import time

from campaigns import hostile_frames, hostile_requests, hostile_services
from campaigns.hostile_target import KINDS, SERVED, Target, outcomes

__all__ = ["KINDS", "SERVED", "hostile_frames", "hostile_requests", "hostile_services"]


def main() -> None:
    kind, *numbers = sys.argv[1:]
    *ports, seconds = numbers
    target = Target(*map(int, ports), end=time.monotonic() + float(seconds))
    times = KINDS[kind](target)
    print(json.dumps({"times": times, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
