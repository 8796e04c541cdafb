"""The files from which a gateway makes the tokenizer of the served model, as one zip archive."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

_PATTERNS = ("*token*.json", "config.json", "generation_config.json", "chat_template.*", "vocab.json", "merges.txt")
_MORE = ("*.jinja", "tokenizer.model")


def tokenizer_archive(model: Path) -> bytes:
    """Return a zip of the tokenizer's files of a model directory. Equal files give equal bytes."""
    found = {path.name: path for pattern in (*_PATTERNS, *_MORE) for path in model.glob(pattern) if path.is_file()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(found):
            archive.writestr(zipfile.ZipInfo(name), found[name].read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()
