"""Predicts step time: seconds = base + per_token * tokens + per_kv * kv_tokens + per_scored * scored.

`kv_tokens` counts the cached positions that each token of the step attends to. A decode at position 500 counts 500, a
chunk of 10 tokens there counts ten times as much. `scored` counts positions with a score: their logits are projected,
which costs a small model as much as the rest of the token.

The fit is recursive least squares with forgetting, so that it follows a machine whose speed changes. `per_scored` is
the mean of what steps with scores took beyond the rest: few steps have any, and others do not pay for a fourth input.
"""

from __future__ import annotations

import math

_FORGETTING_FACTOR = 0.995  # an observation counts half after about 140 steps
_MAX_COVARIANCE_TRACE = 1000.0  # stop forgetting above this, or the covariance grows without bound on identical steps
_MIN_SECONDS_PER_TOKEN = 1e-12  # smallest slope that counts as measured
_MIN_OBSERVATIONS = 8
_SCALE = (1.0, 1 / 64, 1 / 4096)  # brings the three inputs to the same order of magnitude
_WEIGHT = 1 / 16  # of the newest step in a mean
_MAX_DEVIATION = 1.0  # a pause of the machine counts at most so much
_MAX_GROWTH = 2  # how far beyond the largest measured step the model is trusted
_MAX_COST_OF_SCORE = 2.0
_DEVIATIONS = 3  # 99 % of steps deviate less from their prediction than three times the mean


class StepTimeModel:
    """Predicts seconds from (tokens computed, key/value tokens read, positions scored)."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[100.0 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.num_observations = 0
        self._per_scored = 0.0
        self._num_scored_steps = 0
        self._deviation = 0.0  # mean of |seconds / predicted - 1|
        self._most_tokens = self._most_scored = 0.0  # of a measured step

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds, seconds per token, seconds per kv token; each at least 0."""
        base, token, kv = self._weights
        return max(0.0, base * _SCALE[0]), max(0.0, token * _SCALE[1]), max(0.0, kv * _SCALE[2])

    @property
    def is_fitted(self) -> bool:
        """Whether it has enough observations to predict."""
        return self.num_observations >= _MIN_OBSERVATIONS and self.coefficients[1] >= _MIN_SECONDS_PER_TOKEN

    @property
    def seconds_per_scored(self) -> float:
        """Seconds of a scored position, beside those of its token."""
        return self._per_scored

    @property
    def cost_of_score(self) -> float:
        """Return what a token with a score takes, in tokens without one, at most 2.

        A step with few scores takes a fixed time for them. Counted by position it looks dear, so that fewer still would
        be planned; from a few positions on the mean falls.
        """
        token = self.coefficients[1]
        return min(1.0 + (self._per_scored / token if token >= _MIN_SECONDS_PER_TOKEN else 0.0), _MAX_COST_OF_SCORE)

    @property
    def error_factor(self) -> float:
        """Factor by which nearly all steps exceed their prediction at most."""
        return 1.0 + _DEVIATIONS * self._deviation

    def predict(self, tokens: float, kv_tokens: float, scored: float = 0.0) -> float:
        base, token, kv = self.coefficients
        return base + token * tokens + kv * kv_tokens + self._per_scored * scored

    def tokens_within(self, seconds: float, kv_tokens: float) -> float | None:
        """Return how many tokens a step of `seconds` can compute; None without enough observations."""
        base, token, kv = self.coefficients
        return (seconds - base - kv * kv_tokens) / token if self.is_fitted else None

    def chunk_within(
        self, seconds: float, tokens: float, kv_tokens: float, scored: float, context: float, *, is_scored: bool = False
    ) -> float:
        """Return how many tokens, from position `context` on, a step of (tokens, kv_tokens, scored) can add within
        `seconds`. They attend to each other too. `is_scored`: each has a score.

        0 before the first observations, and never much more than a measured step had: costs are not linear.
        """
        if self.num_observations < _MIN_OBSERVATIONS:
            return 0.0
        trusted = max(0.0, _MAX_GROWTH * self._most_tokens - tokens)
        if is_scored:
            trusted = min(trusted, max(0.0, _MAX_GROWTH * self._most_scored - scored))
        _, token, kv = self.coefficients
        left = seconds - self.predict(tokens, kv_tokens, scored)
        each = token + kv * (context + 0.5) + (self._per_scored if is_scored else 0.0)
        if left <= 0 or each < _MIN_SECONDS_PER_TOKEN:
            return trusted if left > 0 else 0.0
        # left = each * count + kv / 2 * count ** 2
        return min(trusted, 2 * left / (each + math.sqrt(each * each + 2 * kv * left)))

    def observe(self, tokens: float, kv_tokens: float, seconds: float, scored: float = 0.0) -> None:
        if self.is_fitted and (predicted := self.predict(tokens, kv_tokens, scored)) > 0:
            deviation = min(abs(seconds / predicted - 1.0), _MAX_DEVIATION)
            self._deviation += _WEIGHT * (deviation - self._deviation)
        self._most_tokens = max(self._most_tokens, tokens)
        if scored:
            self._most_scored = max(self._most_scored, scored)
            seconds = self._without_scores(tokens, kv_tokens, seconds, scored)
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

    def _without_scores(self, tokens: float, kv_tokens: float, seconds: float, scored: float) -> float:
        """Learn what a scored position takes; return the seconds without the scored ones."""
        self._num_scored_steps += 1
        found = max(0.0, (seconds - self.predict(tokens, kv_tokens)) / scored)
        self._per_scored += max(_WEIGHT, 1 / self._num_scored_steps) * (found - self._per_scored)
        return max(0.0, seconds - self._per_scored * scored)
