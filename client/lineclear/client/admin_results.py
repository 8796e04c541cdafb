"""What the admin calls send and return, and the rows of a step."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal, NamedTuple

from google.protobuf.duration_pb2 import Duration

from lineclear.errors import InvalidRequest
from lineclear.v1 import admin_pb2 as pb
from lineclear.v1 import steps_pb2

from .message_fields import set_given

LogLevel = Literal["debug", "info", "warning", "error"]


class DrainStatus(NamedTuple):
    """The state of a server that drains."""

    requests_in_progress: int
    """Running and queued requests."""
    seconds: float
    """Seconds until the server ends the remaining requests. This client resumes them at another server."""


class LoadedAdapter(NamedTuple):
    """A loaded LoRA adapter."""

    name: str
    digest: str
    """SHA-256 of its files, in hexadecimal digits."""
    rank: int
    path: str
    """Its folder on the machine of the server."""
    base_model: str
    """The model that it was made for, as its configuration says."""
    requests_in_progress: int
    warning: str = ""
    """Why its answers may be wrong: it was made for another model than the served one."""


class StepRow(NamedTuple):
    """A row of a step: positions [start, start + num_tokens) of a request. The columns of StepRows in steps.proto."""

    slot: int
    request: int
    start: int
    num_tokens: int
    cached_tokens: int
    kind: str
    """"prefill", "decode" or "recompute". A kind newer than this client counts as "prefill"."""
    samples: bool


_KINDS = {steps_pb2.ROW_KIND_DECODE: "decode", steps_pb2.ROW_KIND_RECOMPUTE: "recompute"}


def step_rows(step: steps_pb2.StepRecord) -> list[StepRow]:
    """Return the rows of a step of `AdminClient.watch_steps`, one by one."""
    rows = step.rows
    kinds = (_KINDS.get(kind, "prefill") for kind in rows.kind)
    return [
        *map(StepRow, rows.slot, rows.request, rows.start, rows.num_tokens, rows.cached_tokens, kinds, rows.samples)
    ]


def seconds_of(duration: Duration) -> float:
    """Return a time of a message."""
    return duration.ToNanoseconds() / 1e9


def adapter_of(message: pb.LoadedAdapter) -> LoadedAdapter:
    return LoadedAdapter(*(getattr(message, name) for name in LoadedAdapter._fields))


def update_scheduling_request(changes: Mapping[str, str | float]) -> pb.UpdateSchedulingRequest:
    """Return the message of UpdateScheduling. Raises InvalidRequest for an unknown setting or another type."""
    request = pb.UpdateSchedulingRequest()
    request.changes.SetInParent()
    for name, value in changes.items():
        try:
            set_given(request.changes, name, value, f"changes.{name}")
        except KeyError:
            raise InvalidRequest.at(f"changes.{name}", _unknown_setting(name)) from None
    return request


def _unknown_setting(name: str) -> str:
    known = [field.name for field in pb.Scheduling.DESCRIPTOR.fields]
    near = difflib.get_close_matches(name, known, n=1)
    return "is no scheduling setting; " + (f"is it {near[0]}?" if near else f"there are {', '.join(known)}")


def scheduling_values(message: pb.Scheduling) -> dict[str, str | int | float]:
    """Return the settings of the message by name."""
    return {field.name: value for field, value in message.ListFields()}
