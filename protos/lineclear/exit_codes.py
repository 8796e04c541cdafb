"""The exit codes of every lineclear process and command. A code has one meaning; docs/exit-codes.md is made from TABLE.

Processes use codes of sysexits.h (64 to 78) and 79. The `lineclear` command reports the error of a call as 100 plus its
gRPC code (101 to 116). Shells, container runtimes and `timeout` use 124 to 165.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class ExitCode(IntEnum):
    """How a process ended."""

    OK = 0
    NEGATIVE = 1
    USAGE = 2
    NO_WORKER = 69
    INTERNAL = 70
    ORPHANED = 71
    WORKER_STUCK = 74
    ALREADY_JOINED = 75
    OTHER_FILES = 76
    CONFIGURATION = 78
    WORKER_CONFIGURATION = 79
    FIRST_OF_GRPC = 100
    INTERRUPTED = 130


class ExitCodeRow(NamedTuple):
    """One line of the table."""

    code: ExitCode
    of: str
    happened: str
    again: str
    """Whether the same command may succeed when it is started again."""


COMMAND: Final = "command"
SCHEDULER: Final = "scheduler"
WORKER: Final = "worker"
PROCESSES: Final = "scheduler, worker"

TABLE: Final = (
    ExitCodeRow(ExitCode.OK, "all", "success; a process was told to stop, and stopped", ""),
    ExitCodeRow(
        ExitCode.NEGATIVE,
        COMMAND,
        "some of several prompts failed; `health`: the server is not serving; `result --cancel`: there was nothing to"
        " cancel; `lineclear-scheduler replay`: a decision differs",
        "",
    ),
    ExitCodeRow(ExitCode.USAGE, COMMAND, "wrong usage, or a file that cannot be read or written", "does not help"),
    ExitCodeRow(
        ExitCode.NO_WORKER,
        SCHEDULER,
        "too many ends of workers without progress (--max-worker-crashes)",
        "may help",
    ),
    ExitCodeRow(
        ExitCode.INTERNAL,
        PROCESSES,
        "a bug, a device that failed, or a worker that failed its self-test; the log says which",
        "may help",
    ),
    ExitCodeRow(ExitCode.ORPHANED, WORKER, "its scheduler is gone", "the scheduler does it"),
    ExitCodeRow(
        ExitCode.WORKER_STUCK,
        SCHEDULER,
        "a worker could not be killed and still holds its device",
        "helps once the device is free",
    ),
    ExitCodeRow(ExitCode.ALREADY_JOINED, WORKER, "another worker is joined", "helps once that one is gone"),
    ExitCodeRow(
        ExitCode.OTHER_FILES,
        SCHEDULER,
        "the worker has read other tokenizer files: the model directory changed",
        "helps",
    ),
    ExitCodeRow(
        ExitCode.CONFIGURATION,
        PROCESSES,
        "cannot run as configured: flags, packages, model, addresses, certificates, sockets",
        "does not help",
    ),
    ExitCodeRow(
        ExitCode.WORKER_CONFIGURATION,
        SCHEDULER,
        "the worker cannot run as configured; its last log line says why",
        "does not help",
    ),
    ExitCodeRow(ExitCode.INTERRUPTED, COMMAND, "interrupted by Ctrl-C", ""),
)
"""Every code but those of gRPC errors, which the command adds to FIRST_OF_GRPC."""


def of_grpc(number: int) -> int:
    """Return the exit code of the command for an error with this gRPC code."""
    return ExitCode.FIRST_OF_GRPC + number
