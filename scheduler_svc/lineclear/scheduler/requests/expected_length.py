"""Estimates of how long an answer will be, for the order of the queue, fair shares and predicted waits.

A wrong estimate changes the order of requests and never their tokens. The default learns from the answers of each
tenant. Another estimator is a class or function that the setting output_length_estimator names as module:factory.
"""

from __future__ import annotations

import pkgutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import structlog

from lineclear.process.exception_location import exception_fields
from lineclear.process.settings_base import ConfigurationError

log = structlog.get_logger()

_DECAY = 0.98  # weight of an answer, against the next one of the same tenant
_TENANT_WEIGHT = 4.0  # answers of the tenant that count beside those of the same prompt length
_MAX_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The known facts of a request. `tenant` is hashed; `expected_tokens` is the client's own number, 0 without one."""

    tenant: str
    prompt_tokens: int
    max_tokens: int
    expected_tokens: int = 0


class OutputLengthEstimator(Protocol):
    """Estimates output tokens. Called on the event loop, so it must not block."""

    def estimate(self, shape: AnswerShape) -> int:
        """Return the expected output tokens of a request; 0 if unknown: then `max_tokens` counts."""

    def observe(self, shape: AnswerShape, output_tokens: int) -> None:
        """Learn from an answer that is complete."""


class DeclaredLength:
    """The client's own number; without one, unknown."""

    def estimate(self, shape: AnswerShape) -> int:
        return shape.expected_tokens

    def observe(self, shape: AnswerShape, output_tokens: int) -> None:
        pass


@dataclass(slots=True)
class _DecayedMean:
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * _DECAY + 1.0
        self.total = self.total * _DECAY + value


@dataclass(slots=True)
class _TenantAnswers:
    """Answers of a tenant: all, by the magnitude of the prompt length, and those with a number of the client."""

    all: _DecayedMean = field(default_factory=_DecayedMean)
    by_prompt: dict[int, _DecayedMean] = field(default_factory=dict)
    declared: _DecayedMean = field(default_factory=_DecayedMean)
    used_of_declared: _DecayedMean = field(default_factory=_DecayedMean)


class LearnedLength:
    """The mean length of the tenant's last answers to prompts of a similar length.

    A number of the client is multiplied by the ratio of use to declaration in the tenant's earlier requests, so that a
    tenant gains nothing by numbers that are always too low.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _TenantAnswers] = OrderedDict()  # the longest unused first

    def estimate(self, shape: AnswerShape) -> int:
        answers = self._tenants.get(shape.tenant)
        if answers is None:
            return shape.expected_tokens
        if shape.expected_tokens:
            used, declared = answers.used_of_declared.total, answers.declared.total
            return round(shape.expected_tokens * (used + shape.expected_tokens) / (declared + shape.expected_tokens))
        similar = answers.by_prompt.get(shape.prompt_tokens.bit_length(), _DecayedMean())
        mean = answers.all.total / answers.all.weight
        return max(1, round((similar.total + _TENANT_WEIGHT * mean) / (similar.weight + _TENANT_WEIGHT)))

    def observe(self, shape: AnswerShape, output_tokens: int) -> None:
        answers = self._tenants.setdefault(shape.tenant, _TenantAnswers())
        self._tenants.move_to_end(shape.tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        answers.all.add(output_tokens)
        answers.by_prompt.setdefault(shape.prompt_tokens.bit_length(), _DecayedMean()).add(output_tokens)
        if shape.expected_tokens:
            answers.declared.add(shape.expected_tokens)
            answers.used_of_declared.add(output_tokens)


ESTIMATORS: dict[str, Callable[[], OutputLengthEstimator]] = {"none": DeclaredLength, "learned": LearnedLength}


def load_estimator(name: str) -> OutputLengthEstimator:
    """Return the estimator of the setting: a name of ESTIMATORS, or module:factory. Raises ConfigurationError."""
    factory = ESTIMATORS.get(name)
    if factory is None:
        try:
            return cast("Callable[[], OutputLengthEstimator]", pkgutil.resolve_name(name))()
        except Exception as error:
            raise ConfigurationError(
                f"--output-length-estimator {name}: {type(error).__name__}: {error}; give none, learned, or "
                "module:factory, where factory() returns an object with estimate and observe"
            ) from None
    return factory()


class OutputLengths:
    """Calls an estimator, bounds its answers, and does without it when it fails."""

    def __init__(self, estimator: OutputLengthEstimator) -> None:
        self._estimator = estimator
        self._has_failed = False

    def expect(self, shape: AnswerShape, num_received: int) -> int:
        """Return the expected output tokens, more than the answer has and at most `max_tokens`; 0 if unknown."""
        try:
            expected = int(self._estimator.estimate(shape))
        except Exception as error:
            self._report(error)
            expected = shape.expected_tokens
        return min(max(expected, num_received + 1), shape.max_tokens) if expected > 0 else 0

    def learn(self, shape: AnswerShape, output_tokens: int) -> None:
        """Pass the length of a complete answer on."""
        try:
            self._estimator.observe(shape, output_tokens)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.error("estimator_failed", **exception_fields(error))
