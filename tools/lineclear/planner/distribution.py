"""A distribution of times in buckets of 1 % width, for millions of values with weights."""

from __future__ import annotations

import math
from typing import Any

_LOG_WIDTH = math.log(1.01)
_LEAST_SECONDS = 1e-7


class Distribution:
    """Counts of seconds; mean and maximum are exact, quantiles within 0.5 %."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self._sum = self._max = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a value `count` times."""
        bucket = int(math.log(seconds) / _LOG_WIDTH // 1) if seconds > _LEAST_SECONDS else -10_000
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count
        self._sum += seconds * count
        if seconds > self._max:
            self._max = seconds

    @property
    def mean(self) -> float:
        """Return the mean; 0 without values."""
        return self._sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the value below which `share` of the values are; 0 without values."""
        rank = share * self.count
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self._max, math.exp((bucket + 0.5) * _LOG_WIDTH)) if bucket > -10_000 else 0.0
        return self._max

    def to_json(self) -> dict[str, Any]:
        """Return mean, p50, p90, p99 and maximum."""
        quantiles = {f"p{round(share * 100)}": self.quantile(share) for share in (0.5, 0.9, 0.99)}
        return {"mean": self.mean, **quantiles, "max": self._max, "count": self.count}
