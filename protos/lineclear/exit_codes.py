"""Exit codes of the processes and of the `lineclear` command. docs/exit-codes.md is generated from TABLE.

Processes use codes of sysexits.h (64 to 78) and 79. The command reports the error of a call as 100 plus its gRPC code
(101 to 116). Shells, container runtimes and `timeout` use 124 to 165.

The light client's command imports this module, so it is not in common/, whose modules need packages of the processes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple


class ExitCode(IntEnum):
    """Exit codes of processes and of the command."""

    OK = 0
    NEGATIVE = 1
    USAGE = 2
    NO_WORKER = 69
    INTERNAL = 70
    ORPHANED = 71
    WORKER_STUCK = 74
    DROPPED = 75
    MODEL_FILES_CHANGED = 76
    CONFIGURATION = 78
    WORKER_CONFIGURATION = 79
    FIRST_OF_GRPC = 100
    INTERRUPTED = 130


class ExitCodeRow(NamedTuple):
    """A row of the table."""

    code: ExitCode
    program: str
    meaning: str
    restart: str
    """Whether the same command may succeed if it is started again."""


COMMAND: Final = "command"
SCHEDULER: Final = "scheduler"
WORKER: Final = "worker"
PROCESSES: Final = "scheduler, worker"

TABLE: Final = (
    ExitCodeRow(ExitCode.OK, "all", "success, also of a process that was stopped", ""),
    ExitCodeRow(
        ExitCode.NEGATIVE,
        COMMAND,
        "some of several prompts failed; `health`: the server is not serving; `cancel`: nothing to"
        " cancel; `lineclear-scheduler replay`: a decision differs",
        "",
    ),
    ExitCodeRow(ExitCode.USAGE, COMMAND, "wrong usage, or a file that cannot be read or written", "does not help"),
    ExitCodeRow(
        ExitCode.NO_WORKER,
        SCHEDULER,
        "workers exited too often without progress (--max-worker-crashes)",
        "may help",
    ),
    ExitCodeRow(
        ExitCode.INTERNAL,
        PROCESSES,
        "a bug, a failed device, or a worker that failed its self-test; see the log",
        "may help",
    ),
    ExitCodeRow(ExitCode.ORPHANED, WORKER, "its scheduler exited", "the scheduler restarts it"),
    ExitCodeRow(
        ExitCode.WORKER_STUCK,
        SCHEDULER,
        "a worker could not be killed and still holds its device",
        "helps once the device is free",
    ),
    ExitCodeRow(ExitCode.DROPPED, WORKER, "its scheduler has dropped it", "the scheduler restarts it"),
    ExitCodeRow(
        ExitCode.MODEL_FILES_CHANGED,
        SCHEDULER,
        "the worker read other tokenizer files: the model directory changed",
        "helps",
    ),
    ExitCodeRow(
        ExitCode.CONFIGURATION,
        PROCESSES,
        "configuration error: flags, packages, model, addresses, certificates, sockets",
        "does not help",
    ),
    ExitCodeRow(
        ExitCode.WORKER_CONFIGURATION,
        SCHEDULER,
        "configuration error of the worker; see its last log line",
        "does not help",
    ),
    ExitCodeRow(ExitCode.INTERRUPTED, COMMAND, "interrupted by Ctrl-C", ""),
)
"""All codes except those of gRPC errors, which are FIRST_OF_GRPC plus the gRPC code."""


def of_grpc(number: int) -> int:
    """Return the command's exit code for an error with this gRPC code."""
    return ExitCode.FIRST_OF_GRPC + number
