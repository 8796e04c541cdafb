"""Writes the JSON file of `bench.gpu`, and the page that is made from it.

    python -m bench.gpu_report bench/results/FILE.json     # makes the page again

Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.figures import Figure, table
from bench.measure import Result
from bench.report import table as table_of_runs

_STATES = {"done": "done", "failed": "**failed**", "left out": "left out"}


def write(report: dict[str, Any], folder: Path) -> Path:
    """Write the file and the page into `folder`; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub("[^a-z0-9]+", "-", str(report["device"].get("name", "unknown device")).lower()).strip("-")
    path = folder / f"{report['date'][:10]}-gpu-{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    try:
        made = page(report)
    except Exception as error:  # the file has all of it
        made = f"The page cannot be made: {error!r}\n"
    path.with_suffix(".md").write_text(made)
    return path


def page(report: dict[str, Any]) -> str:
    """Return the page: device, versions, what became of the parts, and their figures and runs."""
    title = "The rehearsal of the GPU measurements" if report["is_rehearsal"] else "GPU"
    name = report["device"].get("name", "unknown device")
    lines = [f"# {title}: {name}", ""]
    if report["is_rehearsal"]:
        lines += ["On a CPU, with small sizes: that all parts run. Its figures say nothing about speed.", ""]
    for what in ("device", "machine", "versions"):
        lines += [f"{what.capitalize()}: {', '.join(f'{key} {value}' for key, value in report[what].items())}.", ""]
    lines += [
        f"Commit {report['commit']}, {report['date']}. {report['seconds']:.0f} s of at most "
        f"{report['budget_seconds']:.0f} s.",
        "",
        "| part | state | seconds |",
        "|---|---|---|",
    ]
    lines += [f"| {p['name']} | {_STATES[p['state']]} | {p['seconds']:.0f} |" for p in report["parts"]]
    for part in report["parts"]:
        lines += ["", f"## {part['name']}", ""]
        if part["figures"]:
            lines += [table([Figure(**figure) for figure in part["figures"]]), ""]
        if part["error"]:
            lines += ["```", part["error"], "```", ""]
    runs = [Result(**run) for part in report["parts"] for run in part["runs"]]
    for kind in dict.fromkeys(run.workload["kind"] for run in runs):
        same = [run for run in runs if run.workload["kind"] == kind]
        lines += ["", f"## {kind}: {same[0].workload['count']} requests of {same[0].model}", "", table_of_runs(same)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".md").write_text(page(json.loads(source.read_text())))
