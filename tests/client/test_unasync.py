"""The client for threads is generated from the client for asyncio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "client" / "lineclear" / "client"


def test_the_generated_client_is_up_to_date(tmp_path: Path) -> None:
    """After a change of `_async` run `client/unasync.py`."""
    subprocess.run([sys.executable, str(ROOT / "client" / "unasync.py"), "--out", str(tmp_path)], check=True)
    expected = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert {path.name: path.read_text() for path in (CLIENT / "_sync").glob("*.py")} == expected


def test_no_asynchronous_word_is_left_in_the_generated_client() -> None:
    for path in (CLIENT / "_sync").glob("*.py"):
        lines = path.read_text().splitlines()[1:]
        code = "\n".join(line for line in lines if not line.endswith("# unasync: keep"))
        assert not {"async", "await", "asyncio"} & set(code.replace("`", " ").replace("(", " ").split()), path.name
        assert "Async" not in code, path.name
