"""Fields of a settings class: their groups, flags and allowed values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo


class Group(NamedTuple):
    """A topic of --help and docs/configuration.md. Every setting is declared by a group."""

    title: str

    def field(self, default: Any = ..., **bounds: Any) -> Any:
        """Declare a setting. The text below it describes it; the first sentence is its line in --help."""
        return Field(default, json_schema_extra={"group": self.title}, **bounds)


def groups(kind: type[BaseModel]) -> dict[str, dict[str, FieldInfo]]:
    """Return the settings by group, in the order in which groups are first used."""
    found: dict[str, dict[str, FieldInfo]] = {}
    for name, field in kind.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), f"{name} is not declared by a Group"
        found.setdefault(str(extra["group"]), {})[name] = field
    return found


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of a setting, to follow "is not"."""
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(get_args(field.annotation))}"
    bounds = {type(rule).__name__: rule for rule in field.metadata}
    if field.annotation is str:
        return "a text that is not empty" if "MinLen" in bounds else "a text"
    kind = "a whole number" if field.annotation is int else "a number"
    least, most = bounds.get("Ge"), bounds.get("Le")
    above, below = bounds.get("Gt"), bounds.get("Lt")
    lower = f"from {least.ge:.15g}" if least else f"above {above.gt:.15g}" if above else ""
    upper = f"to {most.le:.15g}" if most else f"to below {below.lt:.15g}" if below else ""
    if above and most:
        upper = f"and at most {most.le:.15g}"
    return " ".join(part for part in (kind, lower, upper) if part)
