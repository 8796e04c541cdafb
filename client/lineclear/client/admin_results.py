"""What the admin calls send and return, beside `step_record`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from lineclear.errors import InvalidRequest
from lineclear.v1 import admin_pb2 as pb

LogLevel = Literal["debug", "info", "warning", "error"]


class DrainStatus(NamedTuple):
    """The state of a server that drains."""

    requests_in_progress: int
    """Running and queued requests."""
    seconds: float
    """Seconds until the server ends the remaining requests. This client resumes them at another server."""


def update_scheduling_request(changes: Mapping[str, str | float]) -> pb.UpdateSchedulingRequest:
    """Return the message of UpdateScheduling. Raises InvalidRequest for an unknown setting or another type."""
    request = pb.UpdateSchedulingRequest()
    request.changes.SetInParent()
    for name, value in changes.items():
        try:
            setattr(request.changes, name, value)
        except (AttributeError, TypeError, ValueError):
            raise InvalidRequest.at(f"changes.{name}", "is no scheduling setting, or not of its type") from None
    return request


def scheduling_values(message: pb.Scheduling) -> dict[str, str | int | float]:
    """Return the settings of the message by name."""
    return {field.name: value for field, value in message.ListFields()}
