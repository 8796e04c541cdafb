"""The part of kustomize that deploy/kubernetes uses: resources, components and JSON patches of a kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a kustomization, as `kubectl kustomize` prints them but for their order."""
    return _apply(folder, [])


def _apply(folder: Path, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "components", "patches"}
    for resource in kustomization.get("resources", ()):
        path = folder / resource
        documents += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for component in kustomization.get("components", ()):
        documents = _apply(folder / component, documents)
    for patch in kustomization.get("patches", ()):
        for document in documents:
            if document["kind"] == patch["target"]["kind"]:
                for operation in yaml.safe_load(patch["patch"]):
                    _operate(document, **operation)
    return documents


def _operate(document: Any, op: str, path: str, value: Any) -> None:
    """One operation of RFC 6902."""
    *way, last = (part.replace("~1", "/") for part in path.split("/")[1:])
    for part in way:
        document = document[int(part) if isinstance(document, list) else part]
    if isinstance(document, list):
        assert (op, last) == ("add", "-")
        document.append(value)
        return
    assert op == "add" or last in document
    if op == "test":
        assert document[last] == value
    else:
        document[last] = value
