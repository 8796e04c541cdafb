"""Counter-based noise: one uniform number as a pure function of (seed, position), like Philox (Salmon et al. 2011).

There is no generator state. So batch composition, chunking, preemption and restarts cannot change the samples of a
seeded request. Computed on the host as columns, because both arguments are known when a plan arrives.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIT = 2.0**-52
_DRAW_STREAM = np.uint64(0)
XTC_STREAM = np.uint64(0x585443)
"""Of the numbers that decide whether XTC acts."""


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], stream: np.uint64 = _DRAW_STREAM
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position) pair. Numbers of other streams are independent.

    52 bits of a counter mixed twice: with 53 bits, the product of the number and a sum could round up to the sum.
    """
    counter = _mix((seeds + _GOLDEN) ^ stream) + positions.astype(np.uint64) * _GOLDEN
    bits: npt.NDArray[np.uint64] = _mix(counter) >> np.uint64(12)
    return bits.astype(np.float64) * _UNIT


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
