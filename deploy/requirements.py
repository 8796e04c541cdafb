"""List the dependencies of a process, which the images install in a layer below the product.

python3 requirements.py EXTRA,...      print the requirements of lineclear[EXTRA,...] in ./pyproject.toml
python requirements.py --link PREFIX   add packages installed with pip's --prefix PREFIX to this environment
"""

from __future__ import annotations

import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path


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


if __name__ == "__main__":
    if sys.argv[1] == "--link":
        link(sys.argv[2])
    else:
        print("\n".join(requirements(*sys.argv[1].split(","))))
