"""How much work something is, counted and not timed: whatever else the machine does, the number is the same."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(action: Callable[[], object]) -> int:
    """Calls of Python and C functions in `action` on this thread.

    Nothing is collected meanwhile: the callbacks of a collection are called on whatever thread makes it due.
    """
    calls = 0

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    was_collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(None)
        if was_collecting:
            gc.enable()
    return calls
