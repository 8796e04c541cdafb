"""Options that a command would take without effect: it refuses them, or does not have them."""

from __future__ import annotations

from typing import Any

import pytest

from lineclear import errors
from lineclear.cli import exit_status
from lineclear.exit_codes import ExitCode


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        *((["generate", "a", flag], flag) for flag in ("--logprobs", "--token-timings", "--omit-text", "--deltas")),
        *((["generate", "a", f"{flag}=1"], flag)
          for flag in ("--top-logprobs", "--prompt-logprobs", "--logprob-token-ids")),
        (["generate", "a", "b", "--deltas", "--json"], "--deltas"),
        (["generate", "a", "--concurrency", "2"], "--concurrency"),
        (["generate", "a", "--format", "text"], "--format"),
        (["generate", "a", "--resume"], "--resume"),
        *((["generate", "--token-ids", "1", *more], "--token-ids") for more in (["--chat"], ["--system", "x"])),
        (["attach", "a", "--deltas"], "--deltas"),
        *((["tokenize", "1", "--decode", more], "--decode") for more in ("--count", "--chat")),
        *(([*command, "--on-model-change", "restart"], "--on-model-change")
          for command in (["score", "a", "b"], ["embed", "a"], ["stats"], ["health"], ["model"], ["submit", "a"],
                          ["attach", "a"], ["result", "a"], ["cancel", "a"], ["tokenize", "a"], ["top"])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_option_without_effect_is_refused(cli: Any, server: Any, arguments: list[str], flag: str) -> None:
    result = cli(*arguments)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert flag in result.stderr
    assert server.requests == []


def test_json_options_are_taken_with_json_and_with_several_prompts(cli: Any, server: Any) -> None:
    for more in (["--json"], ["b"]):
        assert cli("generate", "a", "--logprobs", *more).exit_code == 0
    assert [request.output.logprobs for request in server.requests] == [True] * 3


def test_admin_method_at_the_data_address_names_the_flag() -> None:
    error = errors.Unsupported("not offered at this address: admin methods are at --admin-listen")
    assert exit_status.hint(error) == "Start the server with --admin-listen ADDRESS, and give that address to --target."
    assert exit_status.hint(errors.Unsupported("another")) is None
