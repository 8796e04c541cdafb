"""The client for threads is generated from the client for asyncio, and mypy knows the types of both."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

from mypy import api
from support.sources import REPOSITORY

CLIENT = REPOSITORY / "client" / "lineclear" / "client"


def test_no_asynchronous_word_is_left_in_the_generated_client() -> None:
    for path in (CLIENT / "_sync").glob("*.py"):
        code = "\n".join(path.read_text().splitlines()[1:])
        assert not {"async", "await", "asyncio"} & set(code.replace("`", " ").replace("(", " ").split()), path.name
        assert "Async" not in code, path.name


def test_a_change_of_the_source_is_generated_and_a_file_without_source_removed(tmp_path: Path) -> None:
    folder = tmp_path / "client/lineclear/client"
    shutil.copytree(CLIENT / "_async", folder / "_async")
    shutil.copytree(REPOSITORY / "protos/lineclear/v1", tmp_path / "protos/lineclear/v1")
    shutil.copy(CLIENT / "parameters.py", folder)
    shutil.copy(REPOSITORY / "client/generate_sources.py", tmp_path / "client")
    main = runpy.run_path(str(tmp_path / "client/generate_sources.py"))["main"]
    main()
    (folder / "_async/session.py").write_text("async def close() -> None: ...\n")
    (folder / "_async/transport.py").unlink()
    main()
    assert (folder / "_sync/session.py").read_text().endswith("\ndef close() -> None: ...\n")
    names = {path.name for path in (folder / "_async").glob("*.py")}
    assert "transport.py" not in names
    assert {path.name for path in (folder / "_sync").iterdir()} == names


PROGRAM = """
from lineclear.client import Client

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

def wrong(client: Client) -> None:
    client.generate_batch(["a"], temprature=0.0)
    client.generate_batch(["a"], return_exceptions=True)[0].text
"""
ANSWERS = "list[Generation]"
OUTCOMES = "list[Generation | LineclearError]"


def test_batch_types(tmp_path: Path) -> None:
    """Those of AsyncClient are the same: it is the source."""
    program = tmp_path / "caller.py"
    program.write_text(PROGRAM)
    flags = ["--strict", "--config-file", str(REPOSITORY / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    said, errors, _ = api.run([*flags, str(program)])
    assert errors == ""
    checked = said.splitlines()
    shown = [match[1] for line in checked if (match := re.search(r'Revealed type is "(.*)"', line))]
    found = [re.sub(r"[a-z_]+\.", "", kind) for kind in shown]
    pairs = ["list[tuple[int, Generation | LineclearError]]"] * 2
    by_key = ["dict[str, Generation]", "dict[int, Generation | LineclearError]", *pairs]
    assert found == [ANSWERS, ANSWERS, OUTCOMES, OUTCOMES, OUTCOMES, OUTCOMES, ANSWERS, OUTCOMES, *by_key]
    mistakes = "\n".join(line for line in checked if ": error: " in line)
    assert 'Unexpected keyword argument "temprature"' in mistakes
    assert 'has no attribute "text"' in mistakes
