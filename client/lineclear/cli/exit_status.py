"""Exit codes of the command, by the gRPC code of the error."""

from __future__ import annotations

from typing import Any

from google.rpc.code_pb2 import Code

from lineclear.errors import LineclearError, Unreachable, Unsupported
from lineclear.exit_codes import ExitCode, of_grpc


def exit_code(error: LineclearError) -> int:
    """Return 100 + the number of the gRPC code: UNAVAILABLE is 14, so 114."""
    return of_grpc(Code.Value(error.code))


def table() -> str:
    """Return the codes in one paragraph, for --help."""
    named = ", ".join(f"{of_grpc(number)} {code}" for code, number in Code.items() if code != "OK")
    return (
        f"Exit codes: 0 success; {ExitCode.NEGATIVE:d} some of several prompts failed, or the server is not serving"
        f" (health); {ExitCode.USAGE:d} wrong usage; {ExitCode.INTERRUPTED:d} interrupted;"
        f" {ExitCode.FIRST_OF_GRPC:d} + the gRPC code of the error: {named}. `serve` ends with the codes of its"
        " processes, 69 to 79."
    )


def as_dict(error: LineclearError) -> dict[str, Any]:
    """Return the fields of the error that are set, for --json."""
    plain = {
        "class": type(error).__name__,
        "code": error.code,
        "reason": error.reason,
        "message": str(error),
        "retry_after_seconds": error.retry_after_seconds,
        "metadata": error.metadata,
        "violations": [violation._asdict() for violation in error.violations],
    }
    return {name: value for name, value in plain.items() if value not in (None, {}, [])}


# Texts of gRPC for a failed connection and their most likely cause. gRPC has no codes for these.
_HINTS = {
    "WRONG_VERSION_NUMBER": "The server listens without TLS at this address: leave --tls and --tls-ca away.",
    "CERTIFICATE_VERIFY_FAILED": "Its certificate is not trusted here: --tls-ca names the authority that signed it.",
    "create security handshaker": "--tls-ca, --tls-cert and --tls-key are files in PEM form; one of them is not.",
    "Socket closed": "If the server asks for TLS: --tls, or --tls-ca with the authority of its certificate.",
}


def hint(error: LineclearError) -> str | None:
    """Return what to try, None if nothing is known."""
    if isinstance(error, Unsupported) and "--admin-listen" in str(error):
        return "Start the server with --admin-listen ADDRESS, and give that address to --target."
    if not isinstance(error, Unreachable):
        return None
    return next(
        (hint for text, hint in _HINTS.items() if text in str(error)),
        "Is the server running? `lineclear serve --model DIR` starts one; --target names another.",
    )
