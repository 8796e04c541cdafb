"""examples/table.ipynb runs: pandas, batches of answers and scores, and `await` in a cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from lineclear.client import LocalServer

_CURE = "pip install nbclient ipykernel pandas"
nbclient = pytest.importorskip("nbclient", reason=f"no notebooks: {_CURE}")
nbformat = pytest.importorskip("nbformat", reason=f"no notebooks: {_CURE}")
pytest.importorskip("pandas", reason=f"no tables: {_CURE}")

pytestmark = pytest.mark.exhaustive

NOTEBOOK = Path(__file__).parents[2] / "examples" / "table.ipynb"


def test_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with LocalServer("--demo") as server:
        monkeypatch.setenv("LINECLEAR_TARGET", server.target)
        nbclient.NotebookClient(notebook, timeout=120).execute()
    results = [cell.outputs[-1].data["text/plain"] for cell in notebook.cells if cell.get("outputs")]
    answers, scores, firsts = results
    for capital in ("Paris", "Rome", "Tokyo", "Lima"):
        assert answers.count(capital) == 1
        assert scores.count(capital) == 2, "the answer is the most likely one of its country"
    assert firsts.count(",") >= 4
