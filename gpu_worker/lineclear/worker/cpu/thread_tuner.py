"""Sets the number of OpenMP compute threads of each step on a CPU, and tunes it while steps run.

The number is set for the calling thread, which must be the one that runs the steps. torch.set_num_threads is used at
start only: later it would also drop oneDNN's cached primitives. `probe_threads` limits the threads of passes before
serving.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import torch

from lineclear.worker.device import host_info
from lineclear.worker.kernels.native_library import selected_library

from .thread_policy import ThreadPolicy

log = structlog.get_logger()

_MAX_GAP_SECONDS = 0.005  # counted gap between two steps; the rest is waiting for requests
_CORES_CHECK_SECONDS = 1.0  # between two checks of affinity and quota
# A pass of a few tokens reads each weight once: about 40 ms on one thread. More threads gain less on idle cores than
# they lose beside a busy process, where each operation waits for its last thread.
_WEIGHT_BYTES_PER_THREAD = 256 * 2**20


class ThreadTuner:
    """Gives each step the number of threads that was fastest recently, at most the number of usable cores.

    A step's cost includes the gap before it: threads that spin between steps slow down the scheduler and the client on
    the same cores.
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
        self._started_at = self._finished_at = self._cores_checked_at = clock()

    def start_step(self, num_tokens: int) -> None:
        """Set the number of threads for a step of `num_tokens`."""
        self._started_at = now = self._clock()
        if now - self._cores_checked_at > _CORES_CHECK_SECONDS:
            self._cores_checked_at = now
            self._policy.limit(self._cores())
        threads = self._policy.choose(num_tokens)
        if threads != self._threads:
            self._threads = threads
            self._set_threads(threads)
            log.debug("compute_threads", threads=threads, num_tokens=num_tokens)

    def finish_step(self, num_tokens: int) -> None:
        now = self._clock()
        gap = min(self._started_at - self._finished_at, _MAX_GAP_SECONDS)
        self._finished_at = now
        self._policy.observe(num_tokens, now - self._started_at + gap)


@contextlib.contextmanager
def probe_threads(weight_bytes: int) -> Iterator[None]:
    """Limit compute threads to one per 256 MiB of weights, for passes of a few tokens; restore the number afterwards.

    Call it while the worker starts, on the thread that runs the steps later.
    """
    before = torch.get_num_threads()
    threads = min(before, 1 + weight_bytes // _WEIGHT_BYTES_PER_THREAD)
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)  # also sets the threads of MKL, unlike the OpenMP call
    try:
        yield
    finally:
        torch.set_num_threads(before)


def openmp_setter() -> Callable[[int], object] | None:
    """Return `omp_set_num_threads` of the runtime that torch and the kernels share; None if they use different ones."""
    native = selected_library()
    torch_library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    if native is None or torch_library is None:
        return None
    try:
        # dlsym also searches the libraries that these are linked with.
        of_kernels, of_torch = (x["omp_set_num_threads"] for x in (native, ctypes.CDLL(str(torch_library))))
    except (AttributeError, OSError):
        return None
    if ctypes.cast(of_kernels, ctypes.c_void_p).value != ctypes.cast(of_torch, ctypes.c_void_p).value:
        return None
    of_kernels.argtypes, of_kernels.restype = [ctypes.c_int], None
    setter: Callable[[int], object] = of_kernels
    return setter
