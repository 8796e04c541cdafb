"""How long a step takes, learnt from the steps that were: seconds = base + per_token * tokens + per_kv * kv_tokens.

`kv_tokens` are the cached positions that the step's tokens attend to, each counted for every token that does: one
decoding at position 500 counts 500, a chunk of 10 there ten times as much.

Recursive least squares with forgetting, so that it follows a machine whose speed changes. Three numbers and a 3x3
matrix; nothing here knows what a step does.
"""

from __future__ import annotations

_FORGETTING_FACTOR = 0.995  # an observation weighs half after about 140 steps
_MAX_COVARIANCE_TRACE = 1000.0  # bound of the covariance's trace: while steps bring no news, nothing more is forgotten
_MIN_SECONDS_PER_TOKEN = 1e-12  # for a token; less is no measurement
_SCALE = (1.0, 1 / 64, 1 / 4096)  # brings the three inputs to the same order of magnitude


class StepTimeModel:
    """Predicts seconds from (tokens computed, key/value tokens read)."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[100.0 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.num_observations = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(seconds, seconds per token, seconds per kv token), none below zero."""
        base, token, kv = (max(0.0, w * s) for w, s in zip(self._weights, _SCALE, strict=True))
        return base, token, kv

    def predict(self, tokens: float, kv_tokens: float) -> float:
        """Seconds of a step."""
        base, token, kv = self.coefficients
        return base + token * tokens + kv * kv_tokens

    def tokens_within(self, seconds: float, kv_tokens: float) -> float | None:
        """How many tokens a step of `seconds` can compute; None while too little is known to say."""
        return self.more_within(seconds, 0, kv_tokens, 0)

    def more_within(self, seconds: float, tokens: float, kv_tokens: float, context: float) -> float | None:
        """How many tokens at position `context` a step of (tokens, kv_tokens) can take besides, to last `seconds`.

        None while too little is known to say.
        """
        base, token, kv = self.coefficients
        if self.num_observations < 8 or token < _MIN_SECONDS_PER_TOKEN:
            return None
        return (seconds - base - token * tokens - kv * kv_tokens) / (token + kv * context)

    def observe(self, tokens: float, kv_tokens: float, seconds: float) -> None:
        """Learn from one step."""
        x = [_SCALE[0], tokens * _SCALE[1], kv_tokens * _SCALE[2]]
        p = self._covariance
        px = [row[0] * x[0] + row[1] * x[1] + row[2] * x[2] for row in p]
        # Equal steps for hours say nothing about the other directions; forgetting there would let them grow for ever.
        forget = _FORGETTING_FACTOR if p[0][0] + p[1][1] + p[2][2] < _MAX_COVARIANCE_TRACE else 1.0
        spread = forget + sum(v * w for v, w in zip(x, px, strict=True))
        surprise = (seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))) / spread
        self._weights = [w + v * surprise for w, v in zip(self._weights, px, strict=True)]
        self._covariance = [[(p[i][j] - px[i] * px[j] / spread) / forget for j in range(3)] for i in range(3)]
        self.num_observations += 1
