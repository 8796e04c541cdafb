"""Model directories of tiny hybrids with the demo's tokenizer: `python -m support.hybrid_model FAMILY DIRECTORY`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from support.families import tiny_model
from support.service import DEMO_MODEL

_CONTEXT = 1024


def save(family: str, directory: Path) -> Path:
    """Write a random model of a family in `support.families` that can be served as the demo model is."""
    demo = DEMO_MODEL.with_name("model-tiny")
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    tiny_model(family, vocab_size=vocab_size, max_position_embeddings=_CONTEXT).save_pretrained(directory)
    for path in demo.iterdir():
        if "token" in path.name or path.name == "chat_template.jinja":
            shutil.copy(path, directory)
    return directory


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
