"""The scheduling settings that an operator may change while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from lineclear.process.setting_fields import allowed
from lineclear.scheduler.requests.validate.violations import Violations
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import admin_pb2 as pb


def changed(settings: SchedulerSettings, changes: Mapping[str, Any], num_slots: int | None) -> SchedulerSettings:
    """Return the settings with `changes`, each within the range of its setting. Raises InvalidRequest.

    `num_slots` are those of the joined worker; None without one.
    """
    violations = Violations()
    for name, value in changes.items():
        try:
            _adapter(name).validate_python(value)
        except ValidationError:
            violations.add(f"changes.{name}", f"must be {allowed(SchedulerSettings.model_fields[name])}")
    if num_slots is not None and changes.get("max_batch_size", 0) > num_slots:
        violations.add("changes.max_batch_size", f"must be at most {num_slots}, the slots of the joined worker")
    violations.raise_if_any()
    found = settings.model_copy(update=dict(changes))
    if found.min_batch_size > found.max_batch_size:
        violations.add("changes.min_batch_size", f"must be at most {found.max_batch_size}, the batch size")
    violations.raise_if_any()
    return found


def _adapter(name: str) -> TypeAdapter[Any]:
    field = SchedulerSettings.model_fields[name]
    kind: Any = Annotated[field.annotation, Field(), *field.metadata]
    return TypeAdapter(kind)


def in_force(settings: SchedulerSettings) -> pb.Scheduling:
    """Return the values in force. Each field of the message is a setting."""
    return pb.Scheduling(**{field.name: getattr(settings, field.name) for field in pb.Scheduling.DESCRIPTOR.fields})
