"""A limit on malloc's arenas."""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8  # malloc.h of glibc
_MAX_ARENAS = 2  # one thread runs Python at a time, and gRPC's threads may allocate beside it


def limit_arenas() -> None:
    """Limit glibc's arenas for the threads that start later. Other C libraries have none, and no `mallopt`.

    By default there are up to eight arenas for each processor, and each keeps what the peak of its threads needed.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)
