"""The types of the client, by mypy on a small program."""

from __future__ import annotations

import re

import pytest
from mypy import api
from support.sources import REPOSITORY

PROGRAM = """
from lineclear.client import AsyncClient, Client

def threads(client: Client, unknown: bool) -> None:
    reveal_type(client.generate_batch(["a"]))
    reveal_type(client.generate_batch(["a"], return_exceptions=False))
    reveal_type(client.generate_batch(["a"], return_exceptions=True, temperature=0.0))
    reveal_type(client.generate_batch(["a"], return_exceptions=unknown))
    reveal_type([outcome for outcome in client.iter_batch(["a"])])
    reveal_type([outcome for outcome in client.iter_batch(["a"], return_exceptions=True)])
    reveal_type([outcome for outcome in client.iter_batch(["a"], return_exceptions=False)])
    reveal_type([outcome for outcome in client.iter_batch(["a"], return_exceptions=unknown)])
    reveal_type(client.generate_batch({"k": "a"}))
    reveal_type(client.generate_batch({5: "a"}, return_exceptions=True))
    reveal_type([pair for pair in client.as_completed({5: "a"})])
    reveal_type([pair for pair in client.as_completed(["a"])])

async def loop(client: AsyncClient, unknown: bool) -> None:
    reveal_type(await client.generate_batch(["a"]))
    reveal_type(await client.generate_batch(["a"], return_exceptions=False))
    reveal_type(await client.generate_batch(["a"], return_exceptions=True, temperature=0.0))
    reveal_type(await client.generate_batch(["a"], return_exceptions=unknown))
    reveal_type([outcome async for outcome in client.iter_batch(["a"])])
    reveal_type([outcome async for outcome in client.iter_batch(["a"], return_exceptions=True)])
    reveal_type([outcome async for outcome in client.iter_batch(["a"], return_exceptions=False)])
    reveal_type([outcome async for outcome in client.iter_batch(["a"], return_exceptions=unknown)])
    reveal_type(await client.generate_batch({"k": "a"}))
    reveal_type(await client.generate_batch({5: "a"}, return_exceptions=True))
    reveal_type([pair async for pair in client.as_completed({5: "a"})])
    reveal_type([pair async for pair in client.as_completed(["a"])])
"""
ANSWERS = "list[Generation]"
OUTCOMES = "list[Generation | LineclearError]"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The notes of mypy on PROGRAM and on a program with a wrong keyword."""
    folder = tmp_path_factory.mktemp("caller")
    program = folder / "caller.py"
    program.write_text(PROGRAM)
    wrong = folder / "wrong.py"
    wrong.write_text(
        "from lineclear.client import Client\n\n"
        "def wrong(client: Client) -> None:\n"
        "    client.generate_batch(['a'], temprature=0.0)\n"
        "    client.generate_batch(['a'], return_exceptions=True)[0].text\n"
    )
    flags = ["--strict", "--config-file", str(REPOSITORY / "pyproject.toml"), "--cache-dir", str(folder / "cache")]
    said, errors, _ = api.run([*flags, str(program), str(wrong)])
    assert errors == ""
    return said.splitlines()


def test_batch_types(checked: list[str]) -> None:
    shown = [match[1] for line in checked if (match := re.search(r'Revealed type is "(.*)"', line))]
    found = [re.sub(r"[a-z_]+\.", "", kind) for kind in shown]
    pairs = ["list[tuple[int, Generation | LineclearError]]"] * 2
    by_key = ["dict[str, Generation]", "dict[int, Generation | LineclearError]", *pairs]
    assert found == [ANSWERS, ANSWERS, OUTCOMES, OUTCOMES, OUTCOMES, OUTCOMES, ANSWERS, OUTCOMES, *by_key] * 2


def test_unknown_keyword_is_a_type_error(checked: list[str]) -> None:
    assert any("wrong.py:4" in line and "error" in line for line in checked), checked


def test_outcome_may_be_an_error(checked: list[str]) -> None:
    assert any("wrong.py:5" in line and '"text"' in line for line in checked), checked
