"""Converts a model made by `bench.models` to GGUF, with llama.cpp's converter.

    python -m bench.to_gguf LLAMA_CPP_SOURCE MODEL_DIR OUT.gguf

The converter identifies tokenizers by a hash of their output, and this tokenizer is unknown to it. So this script
declares that it splits text like GPT-2's. Needs torch and transformers.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def _part(name: str) -> Any:
    """Import a module of the converter from llama.cpp's sources."""
    return importlib.import_module(f"conversion.{name}")  # noqa: TID251


def convert(source: Path, model: Path, out: Path) -> None:
    """Write `out` in bfloat16."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base: Any = _part("base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    # The default looks for a sentencepiece vocabulary first; this tokenizer is a byte-level BPE.
    for module, names in (
        ("llama", ("LlamaModel",)),
        ("qwen", ("Qwen2Model", "Qwen3Model", "Qwen3MoeModel")),
        ("gemma", ("Gemma3Model",)),
        ("gpt_oss", ("GptOssModel",)),
    ):
        classes: Any = _part(module)
        for name in names:
            getattr(classes, name).set_vocab = lambda self: self._set_vocab_gpt2()
    script = source / "convert_hf_to_gguf.py"
    sys.argv = [str(script), str(model), "--outfile", str(out), "--outtype", "bf16"]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:4]))
