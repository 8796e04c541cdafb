"""Predicts step time from past steps: seconds = base + per_token * tokens + per_kv * kv_tokens.

`kv_tokens` counts the cached positions that each token of the step attends to. A decode at position 500 counts 500, a
chunk of 10 tokens there counts ten times as much.

The fit is recursive least squares with forgetting, so that it follows a machine whose speed changes.
"""

from __future__ import annotations

from typing import Any

_FORGETTING_FACTOR = 0.995  # an observation counts half after about 140 steps
_MAX_COVARIANCE_TRACE = 1000.0  # stop forgetting above this, or the covariance grows without bound on identical steps
_MIN_SECONDS_PER_TOKEN = 1e-12  # smallest slope that counts as measured
_MIN_OBSERVATIONS = 8
_SCALE = (1.0, 1 / 64, 1 / 4096)  # brings the three inputs to the same order of magnitude


class StepTimeModel:
    """Predicts seconds from (tokens computed, key/value tokens read)."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[100.0 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.num_observations = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds, seconds per token, seconds per kv token; each at least 0."""
        base, token, kv = self._weights
        return max(0.0, base * _SCALE[0]), max(0.0, token * _SCALE[1]), max(0.0, kv * _SCALE[2])

    @property
    def is_fitted(self) -> bool:
        """Whether it has enough observations to predict."""
        return self.num_observations >= _MIN_OBSERVATIONS and self.coefficients[1] >= _MIN_SECONDS_PER_TOKEN

    def predict(self, tokens: float, kv_tokens: float) -> float:
        """Return the seconds of a step."""
        base, token, kv = self.coefficients
        return base + token * tokens + kv * kv_tokens

    def tokens_within(self, seconds: float, kv_tokens: float) -> float | None:
        """Return how many tokens a step of `seconds` can compute; None without enough observations."""
        return self.more_within(seconds, 0, kv_tokens, 0)

    def more_within(self, seconds: float, tokens: float, kv_tokens: float, context: float) -> float | None:
        """Return how many more tokens, at position `context`, a step of (tokens, kv_tokens) can take within `seconds`.

        None without enough observations.
        """
        base, token, kv = self.coefficients
        if self.num_observations < _MIN_OBSERVATIONS or token < _MIN_SECONDS_PER_TOKEN:
            return None
        return (seconds - base - token * tokens - kv * kv_tokens) / (token + kv * context)

    def observe(self, tokens: float, kv_tokens: float, seconds: float) -> None:
        """Update the model with a measured step."""
        x0, x1, x2 = _SCALE[0], tokens * _SCALE[1], kv_tokens * _SCALE[2]
        (p00, p01, p02), (_, p11, p12), (_, _, p22) = self._covariance  # symmetric
        gain0 = p00 * x0 + p01 * x1 + p02 * x2
        gain1 = p01 * x0 + p11 * x1 + p12 * x2
        gain2 = p02 * x0 + p12 * x1 + p22 * x2
        forget = _FORGETTING_FACTOR if p00 + p11 + p22 < _MAX_COVARIANCE_TRACE else 1.0
        spread = forget + (x0 * gain0 + x1 * gain1 + x2 * gain2)
        w0, w1, w2 = self._weights
        error = (seconds - (w0 * x0 + w1 * x1 + w2 * x2)) / spread
        self._weights = [w0 + gain0 * error, w1 + gain1 * error, w2 + gain2 * error]
        p01 = (p01 - gain0 * gain1 / spread) / forget
        p02 = (p02 - gain0 * gain2 / spread) / forget
        p12 = (p12 - gain1 * gain2 / spread) / forget
        self._covariance = [
            [(p00 - gain0 * gain0 / spread) / forget, p01, p02],
            [p01, (p11 - gain1 * gain1 / spread) / forget, p12],
            [p02, p12, (p22 - gain2 * gain2 / spread) / forget],
        ]
        self.num_observations += 1

    def dump(self) -> list[Any]:
        """Return a copy of the state."""
        return [list(self._weights), [list(row) for row in self._covariance], self.num_observations]

    def load(self, state: list[Any]) -> None:
        """Restore a dump."""
        self._weights, self._covariance, self.num_observations = state
