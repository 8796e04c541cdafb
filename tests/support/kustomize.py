"""The subset of kustomize that deploy/kubernetes uses: resources, components and JSON patches by kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a kustomization, as `kubectl kustomize` prints them except for their order."""
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


def _operate(document: Any, op: str, path: str, value: Any = None, **source: str) -> None:
    if op == "copy":
        op, value = "add", copy.deepcopy(_at(document, source["from"]))
    parent, _, last = path.rpartition("/")
    place = _at(document, parent)
    key: Any = last.replace("~1", "/")
    if isinstance(place, list):
        key = len(place) if last == "-" else int(last)
        if op == "add":
            place.insert(key, value)
            return
    if op == "test":
        assert place[key] == value
    else:
        assert op == "add" or place[key] is not None
        place[key] = value


def _at(document: Any, path: str) -> Any:
    """Return the value at a JSON pointer."""
    for part in path.split("/")[1:]:
        document = document[int(part) if isinstance(document, list) else part.replace("~1", "/")]
    return document
