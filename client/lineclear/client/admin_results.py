"""What the admin calls return, beside `step_record`."""

from __future__ import annotations

from typing import Literal, NamedTuple

LogLevel = Literal["debug", "info", "warning", "error"]


class DrainStatus(NamedTuple):
    """The state of a server that drains."""

    requests_in_progress: int
    """Running and queued requests."""
    seconds: float
    """Seconds until the server ends the remaining requests. This client resumes them at another server."""
