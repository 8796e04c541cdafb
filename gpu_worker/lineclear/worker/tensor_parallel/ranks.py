"""The ranks of a worker with tensor parallelism: processes that each hold a part of the model.

Rank 0 is the worker process. It owns the sockets to the scheduler, starts the other ranks and sends them each call of
its runner, so that all ranks run the same plans in the same order (rank_runner.py). A rank's death is the worker's
death: rank 0 then ends in the same way, and the scheduler starts another worker. The other ranks die with rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self

import structlog

from lineclear.exit_codes import ExitCode
from lineclear.process import logging_setup
from lineclear.process.parent_death import ParentDeathPipe
from lineclear.worker.device.machine_share import MachineShare, core_list, cores_of, named_cores
from lineclear.worker.settings import WorkerSettings

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()

_VARIABLE = "LINECLEAR_RANK"  # "<rank>:<descriptor of its line to rank 0>:<descriptor of the store>"
_NO_LIMIT = timedelta(days=1)
"""Of waits for other ranks: the scheduler ends a worker that hangs, while it starts and in a step."""
_LOSS_SECONDS = 2.0
"""From the error of an operation of all ranks to the notice that one of them has exited."""
_CLOSE_SECONDS = 5.0
_ANSWER_SECONDS = 120.0
_LOG_SECONDS = 0.02  # another thread writes the line
_HEADER = struct.Struct("<QBQ")  # bytes of the message, kind, number of the call


class Kind(IntEnum):
    """Kinds of messages between ranks."""

    CALL = 1
    """Of the runner of rank 0. The other messages belong to a call: the last one."""
    DRAFTS = 2
    MASKS = 3
    ANSWER = 4


class OutOfStep(Exception):
    """A rank does not do what rank 0 does. The text says since when, and has no content of a request."""


class _Line:
    """Messages between rank 0 and another rank, over a pair of sockets that no other process has."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)

    def is_readable(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))

    def send(self, kind: Kind, number: int, data: bytes) -> None:
        self._line.sendall(_HEADER.pack(len(data), kind, number) + data)

    def receive(self, kind: Kind, number: int) -> bytes:
        length, *found = _HEADER.unpack(self._read(_HEADER.size))
        if found != [kind, number]:
            wanted, got = (f"number {y} of kind {Kind(x).name.lower()}" for x, y in ((kind, number), found))
            raise OutOfStep(f"it waits for message {wanted}, and gets {got}")
        return bytes(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._line.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data


class Ranks:
    """This process among the ranks of its worker. One thread calls the methods."""

    def __init__(
        self, rank: int, store: int, lines: Sequence[_Line], processes: Sequence[subprocess.Popen[bytes]] = ()
    ) -> None:
        """`store`: descriptor of the file through which ranks meet. `lines`: to the other ranks, or to rank 0."""
        self.rank = rank
        self.count = 0
        self._store_file, self._lines, self._processes = store, lines, processes
        self._store: Any = None
        self._names = map(str, itertools.count())  # of the entries that the ranks write to the store
        self._num_calls = 0
        self._is_closing = False

    @classmethod
    def join(cls, count: int, command: Sequence[str]) -> Self:
        """Return this process as a rank of `count`. Rank 0 starts the others by `command`, which calls this, too.

        Call it on the main thread. Raises OSError if a rank cannot be started.
        """
        value = os.environ.pop(_VARIABLE, None)
        if value is None:
            ranks = cls._start(count, command)
        else:
            rank, line, store = map(int, value.split(":"))
            for descriptor in (line, store):
                os.set_inheritable(descriptor, False)
            for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 drains, and needs this one for its steps
                signal.signal(number, signal.SIG_IGN)
            ranks = cls(rank, store, [_Line(socket.socket(fileno=line))])
        ranks.count = count
        return ranks

    @classmethod
    def _start(cls, count: int, command: Sequence[str]) -> Self:
        store, lifeline = os.memfd_create("lineclear-ranks"), ParentDeathPipe()
        lines, processes = list[_Line](), list[subprocess.Popen[bytes]]()
        for rank in range(1, count):
            ours, theirs = socket.socketpair()
            inherited = theirs.fileno(), store, *lifeline.inherited
            own = {_VARIABLE: f"{rank}:{theirs.fileno()}:{store}", **lifeline.environment()}
            processes.append(
                subprocess.Popen(
                    list(command),
                    env={**os.environ, **own},
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stderr=logging_setup.standard_error_of_children(),
                )
            )
            theirs.close()
            lines.append(_Line(ours))
        ranks = cls(0, store, lines, processes)
        threading.Thread(target=ranks._watch, name="ranks", daemon=True).start()
        return ranks

    def connect(self, device: torch.device) -> None:
        """Make the default process group of torch.distributed. Waits for all ranks."""
        from torch import distributed

        for library in ("GLOO", "NCCL"):  # all ranks are on this machine
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        path = f"/proc/self/fd/{self._store_file}"
        self._store = distributed.FileStore(path, self.count)  # type: ignore[attr-defined]
        self._store.set_timeout(_NO_LIMIT)
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.count, timeout=_NO_LIMIT
        )

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block in one rank after the other, rank 0 first."""
        name = next(self._names)
        if self.rank:
            self._store.wait([f"{name}-{self.rank - 1}"])
        yield
        self._store.set(f"{name}-{self.rank}", "")

    def least(self, value: int) -> int:
        name = next(self._names)
        self._store.set(f"{name}-{self.rank}", str(int(value)))
        return min(int(self._store.get(f"{name}-{rank}")) for rank in range(self.count))

    def agree(self, value: bool) -> bool:
        """Return whether all ranks pass True. Waits for all of them."""
        return bool(self.least(value))

    def end_if_lost(self) -> None:
        """Return after a moment, unless this process ends because of another rank, for which an operation has failed.

        So rank 0 ends as the lost rank did, and the other ranks do not report what rank 0 reports.
        """
        time.sleep(_LOSS_SECONDS)

    # --- rank 0 ------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, message: bytes) -> None:
        """Send a message to all other ranks. Blocks while one of them lags by more than the buffer of a socket."""
        self._num_calls += kind is Kind.CALL
        for line in self._lines:
            with contextlib.suppress(OSError):  # the rank has exited: `_watch` ends this process
                line.send(kind, self._num_calls, message)

    def answers(self) -> list[bytes]:
        """Return each other rank's answer to the last call. Ends this process if one is late or to another call."""
        found = list[bytes]()
        for rank, line in enumerate(self._lines, 1):
            try:
                if not line.is_readable(_ANSWER_SECONDS):
                    log.error("rank_hangs", rank=rank, seconds=_ANSWER_SECONDS)
                    _exit_as(ExitCode.INTERNAL)
                found.append(line.receive(Kind.ANSWER, self._num_calls))
            except OutOfStep as error:
                log.error("rank_out_of_step", rank=rank, problem=str(error))
                _exit_as(ExitCode.INTERNAL)
            except (EOFError, OSError):
                self.end_if_lost()
                raise
        return found

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes, 1)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        rank = ranks[poll.poll()[0][0]]
        code = self._processes[rank - 1].wait()
        if not self._is_closing:
            log.error("rank_lost", rank=rank, exit_code=code, hint="the worker ends as it did")
            _exit_as(code)

    def close(self) -> None:
        """End the other ranks, and wait for that: their devices are free then."""
        self._is_closing = True
        for process in self._processes:
            process.kill()  # they have nothing to finish
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_SECONDS)

    # --- the other ranks ---------------------------------------------------------------------------------------------

    def has_message(self, seconds: float) -> bool:
        """Return whether rank 0 sends a message, or has exited, within `seconds`."""
        return self._lines[0].is_readable(seconds)

    def receive(self, kind: Kind) -> bytes:
        """Wait for the next message of rank 0. Raises EOFError if it has exited, OutOfStep if it is of another kind."""
        number = self._num_calls + (kind is Kind.CALL)
        try:
            message = self._lines[0].receive(kind, number)
        except OSError:
            raise EOFError from None
        self._num_calls = number
        return message

    def answer(self, message: bytes) -> None:
        self._lines[0].send(Kind.ANSWER, self._num_calls, message)


def _exit_as(code: int) -> None:
    """Exit as a rank with this exit code did, which tells the scheduler a crash from a signal from outside."""
    time.sleep(_LOG_SECONDS)
    if code < 0:
        is_handled = -code in (signal.SIGTERM, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGKILL if is_handled else -code)
        time.sleep(_LOSS_SECONDS)  # another thread may get it
    os._exit(code if code > 0 else ExitCode.INTERNAL)  # also as process 1 of a container, which no own signal ends


def part_of(settings: WorkerSettings, rank: int, count: int) -> WorkerSettings:
    """Return the settings with the device, or the part of the machine, of one rank."""
    share, (kind, _, place) = MachineShare.parse(settings.machine_share), settings.device.partition(":")
    if kind == "cuda" and place:  # the share is one of each GPU
        return settings.model_copy(update={"device": f"{kind}:{int(place) + rank}"})
    if place:
        place = core_list(cores_of(MachineShare(rank, count), named_cores(settings.device)))
    part = f"{share.index * count + rank}/{share.count * count}"
    return settings.model_copy(update={"device": f"{kind}:{place}" if place else kind, "machine_share": part})
