"""List the dependencies of a process, which the images install in a layer below the product.

python3 requirements.py EXTRA,...      print the requirements of lineclear[EXTRA,...] in ./pyproject.toml
python requirements.py --link PREFIX   add packages installed with pip's --prefix PREFIX to this environment
python requirements.py --sbom          print the packages of this environment as CycloneDX
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote


def requirements(*extras: str) -> Iterator[str]:
    """Yield the dependencies of the project and of the extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from project["dependencies"]
    todo = list(extras)
    while todo:
        for requirement in project["optional-dependencies"][todo.pop()]:
            if requirement.startswith(f"{project['name']}["):
                todo += requirement.partition("[")[2].rstrip("]").split(",")
            else:
                yield requirement


def link(prefix: str) -> None:
    """Write a .pth file that adds the prefix's folder of packages to this environment."""
    packages = Path(sysconfig.get_path("purelib"))
    (packages / "product.pth").write_text(f"{prefix}/{packages.relative_to(sys.prefix)}\n", encoding="utf-8")


def sbom() -> str:
    """Return the installed packages as CycloneDX, in the order of their names and without a time."""
    components = {}
    for found in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        purl = f"pkg:pypi/{name}@{quote(found.version)}"
        component: dict[str, Any] = {"type": "library", "name": name, "version": found.version, "purl": purl}
        if expression := found.metadata["License-Expression"]:
            component["licenses"] = [{"expression": expression}]
        elif len(text := found.metadata["License"] or "") in range(1, 60):
            component["licenses"] = [{"license": {"name": text}}]
        components[name] = component
    listed = [components[name] for name in sorted(components)]
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": listed}, indent=1)


if __name__ == "__main__":
    if sys.argv[1] == "--link":
        link(sys.argv[2])
    else:
        print(sbom() if sys.argv[1] == "--sbom" else "\n".join(requirements(*sys.argv[1].split(","))))
