"""Which process a client belongs to: that of its first call. gRPC's threads and locks do not survive a fork.

In a forked child a call of the parent's client would wait for threads that are not there. So it raises instead, and
what ends calls does nothing: they are the parent's.
"""

from __future__ import annotations

import gc
import os


class OwnerProcess:
    """The process that an object was first used in. Safe to use from many threads."""

    def __init__(self) -> None:
        self._pid: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a child of the one of the first use."""
        return self._pid is not None and self._pid != os.getpid()

    def enter(self) -> None:
        """Note the process. Raises RuntimeError in a child of the one that was noted before."""
        if self.is_elsewhere:
            raise RuntimeError(
                "the client was used before this process was forked; make another one in each process, and start "
                "processes with the method spawn or forkserver where calls may be running meanwhile"
            )
        self._pid = os.getpid()


class AioOwnerProcess(OwnerProcess):
    """The process that used grpc.aio first, of whatever client. A child that uses it, too, is ended by gRPC.

    A child that collects what the parent left of grpc.aio would wait for ever for the parent's thread. So garbage from
    before the fork stays uncollected in the child.
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
