"""Write what an environment consists of: `python bill_of_materials.py SBOM [LICENCES]`, in the environment.

SBOM is CycloneDX 1.6, LICENCES a text with the licence files of each package.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote


def component(package: Distribution) -> dict[str, Any]:
    """Return a package as a component of CycloneDX, with the SPDX expression or what it states instead."""
    name = re.sub(r"[-_.]+", "-", package.name).lower()
    purl = f"pkg:pypi/{name}@{quote(package.version)}"
    facts = package.metadata
    stated = [x.rpartition(":: ")[2] for x in facts.get_all("Classifier", []) if x.startswith("License ::")]
    text = (facts.get("License") or "see its licence files").strip().partition("\n")[0]
    spdx = facts.get("License-Expression")
    licences = [{"expression": spdx} if spdx else {"license": {"name": ", ".join(stated) or text}}]
    kind = "application" if name == "lineclear" else "library"
    return {"type": kind, "bom-ref": purl, "name": name, "version": package.version, "licenses": licences, "purl": purl}


def main(sbom: Path, licences: Path | None = None) -> None:
    """Write the files."""
    found = {x.name.lower(): x for x in distributions() if x.name not in ("pip", "setuptools")}
    ours, others = component(found.pop("lineclear")), [found[name] for name in sorted(found)]
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": ours}}
    bom |= {"components": [component(package) for package in others]}
    sbom.write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")
    if licences is None:
        return
    with licences.open("w", encoding="utf-8") as out:
        for package in others:
            out.write(f"{'=' * 80}\n{package.name} {package.version}: {component(package)['licenses'][0]}\n")
            for path in sorted(package.files or (), key=str):
                if re.match(r"(licen[cs]e|copying|notice)", path.name, re.I):
                    out.write(f"--- {path}\n{path.locate().read_text(encoding='utf-8', errors='replace')}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
