"""A hook of mkdocs: pages that lie outside docs/, and links to files that are no pages.

README.md, deploy/README.md, examples/README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site. A link to
another file of the repository becomes one to LINECLEAR_REPOSITORY_URL, such as https://host/owner/lineclear/blob/main;
without it, plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "deploy/README.md": "deploy.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "README.md": "overview.md",
}
"""Pages of the site by their path in the repository, besides those in docs/."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_HERE = {page: path for path, page in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    for page, path in _HERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    name = page.file.src_uri
    return rewrite(markdown, _HERE.get(name, f"docs/{name}"))


def rewrite(markdown: str, path: str) -> str:
    """Return the text of the page at `path` in the repository, with links that work on the site."""
    folder = posixpath.dirname(path)

    def replace(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        file, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(folder, file))
        part = f"#{anchor}" if anchor else ""
        if found in PAGES:
            return f"{image}[{text}]({PAGES[found]}{part})"
        if found.startswith("docs/") and Path(found).suffix in {".md", ".svg", ".png"}:
            return f"{image}[{text}]({posixpath.relpath(found, 'docs')}{part})"
        base = os.environ.get("LINECLEAR_REPOSITORY_URL", "").rstrip("/")
        return f"[{text}]({base}/{found}{part})" if base else text

    return _LINK.sub(replace, markdown)
