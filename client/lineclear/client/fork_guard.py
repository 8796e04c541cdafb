"""Detect that a client is used in a forked child. gRPC's threads and locks do not survive a fork.

In the child a call would wait for threads that do not exist, so it raises RuntimeError. Cancelling and closing do
nothing there: the calls belong to the parent.
"""

from __future__ import annotations

import gc
import os


class OwnerProcess:
    """The process that first used an object. Thread-safe."""

    def __init__(self) -> None:
        self._pid: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process, the parent of this one, used the object first."""
        return self._pid is not None and self._pid != os.getpid()

    def enter(self) -> None:
        """Record this process at the first call. Raises RuntimeError in a forked child of that process."""
        if self.is_elsewhere:
            raise RuntimeError(
                "the client was used before this process was forked; make a new one in each process, and start "
                "processes with the method spawn or forkserver if calls may run during the fork"
            )
        self._pid = os.getpid()


class AioOwnerProcess(OwnerProcess):
    """The process that first used grpc.aio, by any client. gRPC crashes or hangs in a child that uses it too.

    The collection of the parent's grpc.aio objects would hang in the child. So the child never collects garbage from
    before the fork.
    """

    def __init__(self) -> None:
        super().__init__()
        os.register_at_fork(after_in_child=self._keep_garbage)

    def _keep_garbage(self) -> None:
        if self.is_elsewhere:
            gc.freeze()

    def enter(self) -> None:
        if self.is_elsewhere:
            raise RuntimeError(
                "an AsyncClient was used before this process was forked, and gRPC for asyncio does not work in the "
                "child; start processes with the method spawn or forkserver, or use a Client in the child"
            )
        super().enter()


AIO = AioOwnerProcess()
