"""The compute threads of a step on a CPU: sets their number in the OpenMP runtime, and tunes it while steps run.

The number is set for the calling thread, which must be the one that runs the steps. torch.set_num_threads is for the
start only: at run time it would also drop oneDNN's prepared products.

Before there are steps to measure, the passes that try a model use as many threads as its size is worth (`trying`).
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import torch

from lineclear.worker import host_info
from lineclear.worker.kernels import library

from .thread_policy import ThreadPolicy

log = structlog.get_logger()

_MOST_GAP_SECONDS = 0.005  # between two steps; more than that is waiting for requests
_LOOK_SECONDS = 1.0  # between two looks at affinity and quota
# A pass of a few tokens reads each weight once: some 40 ms on one thread. More threads would gain less on quiet cores
# than they lose beside a busy process, where each operation of the pass waits at its end for a thread without a core.
_WEIGHT_BYTES_PER_THREAD = 256 * 2**20


class ThreadTuner:
    """Gives each step the number of threads that was fastest lately, of at most as many as there are usable cores.

    A step's cost includes the gap before it, because threads that spin between steps slow down the scheduler and the
    client on the same cores.
    """

    def __init__(
        self,
        set_threads: Callable[[int], object],
        *,
        cores: Callable[[], int] = host_info.usable_cores,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._set_threads, self._cores, self._clock = set_threads, cores, clock
        self._policy = ThreadPolicy(cores())
        self._threads = 0
        self._began_at = self._ended_at = self._looked_at = clock()

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self._began_at = now = self._clock()
        if now - self._looked_at > _LOOK_SECONDS:
            self._looked_at = now
            self._policy.limit(self._cores())
        threads = self._policy.choose(num_tokens)
        if threads != self._threads:
            self._threads = threads
            self._set_threads(threads)
            log.debug("compute_threads", threads=threads, num_tokens=num_tokens)

    def end(self, num_tokens: int) -> None:
        """The step that began last is complete."""
        now = self._clock()
        gap = min(self._began_at - self._ended_at, _MOST_GAP_SECONDS)
        self._ended_at = now
        self._policy.observe(num_tokens, now - self._began_at + gap)


@contextlib.contextmanager
def trying(weight_bytes: int) -> Iterator[None]:
    """Run passes of a few tokens, of a model with so many bytes of weights, with one thread for each 256 MiB.

    At most as many as there are now, which there are again afterwards. Called while the worker starts, on the thread
    that runs the steps later.
    """
    before = torch.get_num_threads()
    threads = min(before, 1 + weight_bytes // _WEIGHT_BYTES_PER_THREAD)
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)  # that of OpenMP would leave MKL's as it is
    try:
        yield
    finally:
        torch.set_num_threads(before)


def openmp_setter() -> Callable[[int], object] | None:
    """`omp_set_num_threads` of the runtime that torch and the kernels share; None where they do not share one."""
    native = library()
    torch_library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    if native is None or torch_library is None:
        return None
    try:
        # A symbol is looked up in the libraries that these were linked with, too.
        ours, theirs = (x["omp_set_num_threads"] for x in (native, ctypes.CDLL(str(torch_library))))
    except (AttributeError, OSError):
        return None
    if ctypes.cast(ours, ctypes.c_void_p).value != ctypes.cast(theirs, ctypes.c_void_p).value:
        return None
    ours.argtypes, ours.restype = [ctypes.c_int], None
    setter: Callable[[int], object] = ours
    return setter
