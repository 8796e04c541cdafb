"""Count the work of an action instead of timing it, so that the number does not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(action: Callable[[], object]) -> int:
    """Return the number of Python and C calls in `action` on this thread.

    Garbage collection is off: its callbacks run on an arbitrary thread.
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
