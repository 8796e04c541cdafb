"""docs/supported.md lists the families, libraries, backends and Python versions of the code."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

from lineclear.worker.attention.registry import BACKENDS
from lineclear.worker.decoder.decoder_layers import EXPERT_FAMILIES, FAMILIES
from lineclear.worker.model.verified_families import VERIFIED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "supported.md").read_text()


def table(header: str) -> dict[str, str]:
    """Return the rows of the table whose header starts with `header`: name in backticks to the second column."""
    rows = PAGE.partition(f"| {header} |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]*?) ?\|", rows, re.MULTILINE))


def test_families_are_those_of_the_code() -> None:
    assert set(table("family")) == VERIFIED
    for state, families in (("yes", FAMILIES - EXPERT_FAMILIES), ("on CPUs", EXPERT_FAMILIES)):
        assert {family for family, fused in table("family").items() if fused == state} == families


def test_kernel_libraries_are_those_of_the_code() -> None:
    variants = runpy.run_path(str(ROOT / "hatch_build.py"))["VARIANTS"]
    assert list(table("library")) == [name for of_machine in variants.values() for name in of_machine]


def test_attention_backends_are_those_of_the_code() -> None:
    assert set(table("`--attention-backend`")) == set(BACKENDS)


def test_python_versions_are_those_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    assert set(table("Python")) == {
        f"3.{x.removeprefix(prefix)}" for x in package["classifiers"] if x.startswith(prefix)
    }
