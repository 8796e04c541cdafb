"""Collect the violations of one request, so that they are reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from lineclear.errors import InvalidRequest, TokenOutOfVocabulary, Violation

_MAX_VIOLATIONS = 16  # the status is sent in a header, whose size is limited


class Violations:
    """The violations of one request. `kinds` are the error classes of single violations."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.kinds: set[type[InvalidRequest]] = set()
        self.metadata: dict[str, str] = {}

    def add(self, path: str, description: str, kind: type[InvalidRequest] = InvalidRequest, **figures: int) -> None:
        self.violations.append(Violation(path, description))
        self.kinds.add(kind)
        self.metadata.update({name: str(figure) for name, figure in figures.items()})

    def raise_if_any(self) -> None:
        """Raise the most specific class that fits all violations."""
        if not self.violations:
            return
        kind = next(iter(self.kinds)) if len(self.kinds) == 1 else InvalidRequest
        count = len(self.violations)
        first = self.violations[0]
        message = f"{first.field}: {first.description}" + (f" (and {count - 1} more)" if count > 1 else "")
        raise kind(message, violations=self.violations[:_MAX_VIOLATIONS], metadata=self.metadata)


class Rule(NamedTuple):
    """What a field of a request may be, and the description of a violation."""

    allows: Callable[[Any], bool]
    description: str


def check_rules(given: Mapping[str, Any], rules: Mapping[str, Rule], violations: Violations, prefix: str = "") -> None:
    """Add the violations of the fields that have a rule. `given` are the fields that are set, by name."""
    for name, value in given.items():
        rule = rules.get(name)
        if rule is not None and not rule.allows(value):
            violations.add(f"{prefix}{name}", rule.description)


def given_fields(message: Message) -> dict[str, Any]:
    """Return the fields that are set, by name. Asking for each takes longer than the rest of the validation."""
    return {field.name: value for field, value in message.ListFields()}


def checked_ids(path: str, ids: Sequence[int], limit: int, vocab_size: int, violations: Violations) -> tuple[int, ...]:
    """Return the ids, or () for more than `limit`. Add a violation for that and for an id outside the vocabulary."""
    if not ids:
        return ()
    if len(ids) > limit:
        violations.add(path, f"has more than {limit} entries")
        return ()
    check_vocabulary(path, ids, vocab_size, violations)
    return tuple(ids)


def check_vocabulary(path: str, ids: Sequence[int], vocab_size: int, violations: Violations, start: int = 0) -> None:
    """Add the first id that is outside the vocabulary. `start` is the index of `ids[0]` in the request's field."""
    if not ids or max(ids) < vocab_size:
        return
    index = next(index for index, token_id in enumerate(ids, start) if token_id >= vocab_size)
    add_out_of_vocabulary(f"{path}[{index}]", vocab_size, violations)


def add_out_of_vocabulary(path: str, vocab_size: int, violations: Violations) -> None:
    description = f"must be in [0, vocabulary), which is {vocab_size}"
    violations.add(path, description, TokenOutOfVocabulary, vocab_size=vocab_size)


def checked_texts(
    path: str, texts: Sequence[str], max_count: int, max_bytes: int, violations: Violations
) -> tuple[str, ...]:
    """Return the texts; (), with a violation, for more than `max_count` or a size out of bounds.

    So nothing is made of texts that may be as large as a request.
    """
    if not texts:
        return ()
    if len(texts) > max_count:
        violations.add(path, f"has more than {max_count} entries")
        return ()
    wrong = [index for index, text in enumerate(texts) if not 1 <= len(text.encode()) <= max_bytes]
    for index in wrong:
        violations.add(f"{path}[{index}]", f"must have 1 to {max_bytes} bytes")
    return () if wrong else tuple(texts)
