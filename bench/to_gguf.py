"""A GGUF file of a model made by `bench.models`, with llama.cpp's own converter.

    python -m bench.to_gguf LLAMA_CPP_SOURCE MODEL_DIR OUT.gguf

The converter knows tokenizers by a hash of what they do, and nobody has seen ours: it is told that ours splits text as
GPT-2's does. Runs in an environment with torch and transformers, such as lineclear's.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def _part(name: str) -> Any:
    """A module of the converter, which comes with llama.cpp's sources."""
    return importlib.import_module(f"conversion.{name}")  # noqa: TID251


def convert(source: Path, model: Path, out: Path) -> None:
    """Write `out` in bfloat16."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base: Any = _part("base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    # These would look for a sentencepiece vocabulary first, and ours is a byte-level BPE.
    for module, names in (("llama", ("LlamaModel",)), ("qwen", ("Qwen2Model", "Qwen3Model"))):
        classes: Any = _part(module)
        for name in names:
            getattr(classes, name).set_vocab = lambda self: self._set_vocab_gpt2()
    script = source / "convert_hf_to_gguf.py"
    sys.argv = [str(script), str(model), "--outfile", str(out), "--outtype", "bf16"]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:4]))
