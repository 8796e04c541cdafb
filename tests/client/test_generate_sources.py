"""The client for threads is generated from the client for asyncio."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

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
