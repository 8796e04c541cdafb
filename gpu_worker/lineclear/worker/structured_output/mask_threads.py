"""Computes masks beside the forward pass, and bounds the time that a step waits for them.

Masks of a matcher whose last one was quick are computed at once, by several threads. If its last mask was slow, the
next ones are computed by one thread of the lowest priority, in order, and no step with other rows waits for them. A row
whose mask is not ready is deferred: the mask goes on, and the row that is planned again for its position takes it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from lineclear.process.priority import LOWEST, lower_priority

Bits = npt.NDArray[np.uint32]
"""Bit i % 32 of word i // 32 is set if token i is allowed."""

MIN_WAIT_SECONDS = 0.004
"""A step waits for masks behind its forward pass as long as that took, and at least this long.

So a step takes at most twice as long as without masks. Ordinary masks take 0.1 to 0.9 ms and are ready before."""
ALONE_WAIT_SECONDS = 0.02
"""The same for a step whose only rows lack a mask: nothing else waits, and planning them again costs a step."""
MAX_WORK_SECONDS = 10.0
"""CPU time of the thread that computes a mask, from the first row that lacks it to the end of its request.

One mask is at most 10 ms of work; the rest is the queue of other slow ones. A busy machine makes a mask later, but no
request fails for that."""
_SLOW_SECONDS = 0.002
"""CPU time of a mask; the next one of its matcher is computed at low priority."""


class Mask:
    """The mask of one row, from its request to the step that uses it."""

    def __init__(self, compute: Callable[[], Bits], *, is_slow: bool, compiled: Future[Any] | None = None) -> None:
        self.compute = compute
        self.is_slow = is_slow
        self.compiled = compiled
        """The mask waits for it, without a thread."""
        self.bits: Bits | None = None
        """None until the mask is ready."""
        self.is_deferred = False
        """Whether a step went on without it."""
        self.thread: int | None = None
        """Identifier of the thread that computes it, or that works through the queue that it is in."""
        self.work_before: float | None = None
        """CPU time of that thread when the mask was first found late."""


class MaskThreads:
    """Threads that compute masks. The launch thread calls the methods."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_seconds: Callable[[int], float] | None = None
    ) -> None:
        """`cpu_seconds` returns the CPU time of a thread."""
        self._clock, self._cpu_seconds = clock, cpu_seconds or cpu_seconds_of
        self._tokens: ThreadPoolExecutor | None = None  # a new one: no step waits for masks of an earlier one
        self._quick: ThreadPoolExecutor | None = None
        self._slow: ThreadPoolExecutor | None = None
        self._slow_thread: int | None = None
        self._num_quick = min(4, max(1, len(os.sched_getaffinity(0))))
        self._changed = threading.Condition()
        self._num_waiting = 0  # quick masks of the present step that are not ready
        self._step = 0
        self._started_at = 0.0
        self._has_tokens = True  # the tokens of the step before are known

    def start(self, masks: Sequence[Mask], take_tokens: Callable[[], None]) -> None:
        """Compute the masks of a step, once `take_tokens` has returned, while the caller goes on."""
        if self._tokens is None:
            self._tokens = ThreadPoolExecutor(1, thread_name_prefix="mask-tokens")
            self._quick = ThreadPoolExecutor(self._num_quick, thread_name_prefix="masks")
            self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks", initializer=self._start_slow)
        self._started_at = self._clock()
        self._step += 1
        quick = deque(mask for mask in masks if not mask.is_slow)
        slow = [mask for mask in masks if mask.is_slow]
        with self._changed:
            self._num_waiting, self._has_tokens = len(quick), not masks
        if masks:
            self._tokens.submit(self._start, self._step, quick, slow, take_tokens)

    def _start_slow(self) -> None:
        self._slow_thread = threading.get_ident()
        lower_priority(LOWEST)

    def _start(self, step: int, quick: deque[Mask], slow: Sequence[Mask], take_tokens: Callable[[], None]) -> None:
        assert self._quick is not None
        assert self._slow is not None
        try:
            take_tokens()
        finally:  # if the device has failed, the step does, too
            with self._changed:
                self._has_tokens = self._has_tokens or step == self._step
                self._changed.notify_all()
        for _ in range(min(self._num_quick, len(quick))):
            self._quick.submit(self._compute_all, step, quick)
        for mask in slow:
            if mask.compiled is None:
                self._slow.submit(self._compute, mask)
            else:
                mask.compiled.add_done_callback(functools.partial(self._submit_slow, mask))

    def _submit_slow(self, mask: Mask, _: Future[Any]) -> None:
        assert self._slow is not None
        self._slow.submit(self._compute, mask)

    def _compute_all(self, step: int, masks: deque[Mask]) -> None:
        while True:
            try:
                mask = masks.popleft()
            except IndexError:
                return
            self._compute(mask)
            with self._changed:
                if step == self._step:
                    self._num_waiting -= 1
                    if not self._num_waiting:
                        self._changed.notify_all()

    def _compute(self, mask: Mask) -> None:
        mask.thread, began_at = threading.get_ident(), time.thread_time()
        bits = mask.compute()
        mask.is_slow = time.thread_time() - began_at > _SLOW_SECONDS
        mask.bits = bits
        if mask.is_deferred:
            with self._changed:
                self._changed.notify_all()

    def wait(self, masks: Sequence[Mask], *, is_alone: bool) -> None:
        """Wait until the masks are ready or time is over; if no other row samples (`is_alone`), for late ones too."""
        with self._changed:
            while not self._has_tokens:  # the step before still runs on the device
                self._changed.wait()
            forward = self._clock() - self._started_at
            self._changed.wait_for(lambda: not self._num_waiting, max(MIN_WAIT_SECONDS, forward))
            if is_alone and masks and all(mask.bits is None for mask in masks):
                for mask in masks:
                    mask.is_deferred = True
                self._changed.wait_for(lambda: any(mask.bits is not None for mask in masks), ALONE_WAIT_SECONDS)
        for mask in masks:
            mask.is_deferred = mask.is_deferred or mask.bits is None

    def is_overdue(self, mask: Mask) -> bool:
        """Return whether a mask that is not ready is given up."""
        if mask.thread is None and mask.is_slow and (mask.compiled is None or mask.compiled.done()):
            mask.thread = self._slow_thread
        if mask.thread is None:
            return False
        work = self._cpu_seconds(mask.thread)
        if mask.work_before is None:
            mask.work_before = work
        return work - mask.work_before > MAX_WORK_SECONDS


def cpu_seconds_of(thread: int) -> float:
    """Return the CPU time of a thread that runs."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
