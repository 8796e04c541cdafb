"""Register a command; convert its errors to a message and an exit code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from lineclear.errors import LineclearError
from lineclear.exit_codes import ExitCode

from . import exit_status, output
from .options import expanded

app = typer.Typer(
    name="lineclear",
    epilog=exit_status.table(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command. A LineclearError becomes a message and an exit code."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        inner = expanded(function)

        def guarded(**given: Any) -> None:
            try:
                inner(**given)
            except LineclearError as error:
                if given.get("json_lines"):
                    output.show_json({"error": exit_status.as_dict(error)})
                output.show_error(error)
                raise typer.Exit(exit_status.exit_code(error)) from None
            except KeyboardInterrupt:
                output.print_stderr("interrupted")
                raise typer.Exit(ExitCode.INTERRUPTED) from None
            except BrokenPipeError:
                raise  # the reader of the output has exited: typer exits quietly
            except OSError as error:
                output.print_stderr(f"error: {output.os_error_text(error)}", "bold red")
                raise typer.Exit(ExitCode.USAGE) from None

        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        guarded.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        guarded.__name__ = function.__name__
        guarded.__signature__ = inner.__signature__  # type: ignore[attr-defined]
        guarded.__annotations__ = inner.__annotations__
        app.command(**settings)(guarded)
        return function

    return register
