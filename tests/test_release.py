"""What a release needs at each commit: SBOM, agreeing versions, a CI file without secrets.

`make release` checks the rest: equal bytes of two builds, and installations without a compiler.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

WORKFLOW = REPOSITORY / ".github/workflows/ci.yml"


def command(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    return done.stderr + done.stdout


@pytest.fixture
def commit(tmp_path: Path) -> Path:
    """A repository with one commit, of the files that the check of versions reads."""
    for name in ("pyproject.toml", "CHANGELOG.md", "deploy/release.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for words in ("init -q", "add .", "-c user.name=x -c user.email=x commit -qm x"):
        command("git", *words.split(), cwd=tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ("", ""),
        ("git tag v9.9.9", r"has version [\d.]+, and this commit the tag v9\.9\.9"),
        ("git tag v{version}", "needs the heading"),
        ("touch other", "not clean"),
    ],
)
def test_tag_version_and_tree_must_agree(commit: Path, change: str, outcome: str) -> None:
    changelog = commit / "CHANGELOG.md"
    if "v{version}" in change and f"## {version('lineclear')}, unreleased" not in changelog.read_text():
        pytest.skip("this version is released")
    command(*change.format(version=version("lineclear")).split() or ["true"], cwd=commit)
    code = "import runpy; runpy.run_path('deploy/release.py')['checked_version']()"
    found = command(sys.executable, "-c", code, cwd=commit)
    assert re.search(outcome, found) if outcome else found == ""


def test_bill_of_materials_lists_this_environment(tmp_path: Path) -> None:
    sbom, licences = tmp_path / "sbom.cdx.json", tmp_path / "licences.txt"
    command(sys.executable, REPOSITORY / "deploy/bill_of_materials.py", sbom, licences, cwd=tmp_path)
    document = json.loads(sbom.read_text())
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "lineclear")
    found = {part["name"]: part for part in document["components"]}
    assert found["grpcio"]["purl"] == f"pkg:pypi/grpcio@{version('grpcio')}"
    assert len(found) == len(document["components"]) > 20, "a package is listed twice"
    assert all(part["version"] and part["licenses"] for part in found.values())
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[\w.%-]+", part["purl"]) for part in found.values())  # 2.13.0%2Bcpu
    assert "Apache License" in licences.read_text()


def test_hosted_jobs_run_the_commands_of_this_repository() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in WORKFLOW.read_text()
    steps = {name: job["steps"] for name, job in workflow["jobs"].items()}
    assert ".ci/run" in [step.get("run") for step in steps["test"]]
    assert "make release" in [step.get("run") for step in steps["release"]]
    assert (REPOSITORY / ".ci/run").stat().st_mode & 0o100
    used = [step["uses"] for part in steps.values() for step in part if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []
