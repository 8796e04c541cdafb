"""A directory as of Hugging Face for a GGUF file: its configuration and tokenizer, and a link to the file.

Everything else then reads a model directory, whatever the weights lie in. It is in the user's cache, under a name that
follows from its content and the path of the file, and is never changed: another content is another directory. Making
one removes those of files that are gone or changed, so there is one for each file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .gguf_config import config_of, generation_config_of
from .gguf_file import LINK, GgufBroken, GgufHead, read_head
from .gguf_tokenizer import tokenizer_of

CONFIG = "config.json"
_UNFINISHED_SECONDS = 3600
"""A directory that is not finished after that belongs to a process that was killed."""


class NoPlace(OSError):
    """The directory cannot be written; the message says where."""


def directory_of(path: Path) -> Path:
    """Return the directory for a GGUF file, made if it does not exist. Raises GgufBroken, NoPlace and OSError."""
    path = path.resolve()
    texts = _texts(path, read_head(path))
    digest = hashlib.sha256(json.dumps([str(path), texts]).encode()).hexdigest()[:24]
    places = _places()
    for root in places:
        directory = root / digest / path.stem
        if _is_own(directory) or _write(directory, path, texts):
            return directory
    raise NoPlace(f"neither {' nor '.join(map(str, places))} can be written; set XDG_CACHE_HOME to a private directory")


def config_text(path: Path, head: GgufHead) -> str:
    """Return the content of config.json for a file. Raises GgufBroken."""

    def factors(name: str) -> list[float] | None:
        tensor = head.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.size > 1 << 16:
            raise GgufBroken(f"has a tensor {name} that is no short list of numbers")
        with path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.size)))

    return json.dumps(config_of(head, factors))


def _texts(path: Path, head: GgufHead) -> dict[str, str]:
    tokenizer, tokenizer_config = tokenizer_of(head.metadata)
    return {
        CONFIG: config_text(path, head),
        "generation_config.json": json.dumps(generation_config_of(head)),
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": json.dumps(tokenizer_config),
    }


def _places() -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [cache / "lineclear" / "gguf", Path(tempfile.gettempdir()) / f"lineclear-gguf-{os.geteuid()}"]


def _is_own(directory: Path) -> bool:
    """Return whether the directory is there, in a place that only this user writes to."""
    try:
        found = [path.lstat() for path in (directory.parent.parent, directory.parent, directory)]
    except OSError:
        return False
    return all(each.st_uid == os.geteuid() and not each.st_mode & 0o022 for each in found)


def _write(directory: Path, path: Path, texts: Mapping[str, str]) -> bool:
    """Make the directory at once, so that no process sees a part of it. Return False if it cannot be."""
    root = directory.parent.parent
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=root))
    except OSError:
        return False
    try:
        (made / directory.name).mkdir(mode=0o700)
        for name, text in texts.items():
            (made / directory.name / name).write_text(text, "utf-8")
        (made / directory.name / LINK).symlink_to(path)
        made.rename(directory.parent)
    except OSError:
        pass  # another process was first, or the disk is full
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if not _is_own(directory):
        return False
    now = directory.stat().st_mtime
    for other in root.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if other != directory.parent and _is_outdated(other, path, now):
                shutil.rmtree(other, ignore_errors=True)
    return True


def _is_outdated(made: Path, path: Path, now: float) -> bool:
    """Return whether the file of a directory is gone, or is that of `path`, which has another directory now."""
    if made.name.startswith("."):
        return made.stat().st_mtime < now - _UNFINISHED_SECONDS
    files = [link.readlink() for link in made.glob(f"*/{LINK}")]
    return path in files or not any(file.exists() for file in files)
