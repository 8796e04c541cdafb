"""Measures the accuracy of 4- and 8-bit formats: perplexity, and how often the most likely next token stays the same.

    python -m bench.quality [--model demo/model] [--quantized PATH ...] [--text FILE ...] [--out bench/results/NAME]

Texts are the demonstration model's corpus from a seed outside its training, and files outside its domain, which are
harder for the formats. `--quantized` adds checkpoints and GGUF files that were made of the model. Windows run in chunks
through the worker's model and paged attention, so that keys and values are read back from blocks. Writes a page and one
JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measure import commit, machine, versions
from lineclear.worker.attention.base import Chunk, pack_chunks
from lineclear.worker.attention.registry import BACKENDS, choose
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, load, to_quantized

TOP = Path(__file__).parents[1]
DEMO = TOP / "demo"
WINDOW, CHUNK, BLOCK_SIZE = 512, 64, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """Number formats. The first of `VARIANTS` is the baseline."""

    name: str
    dtype: torch.dtype
    weights: str = "auto"
    kv_dtype: torch.dtype | None = None
    source: str = ""
    """A quantized file of the model; empty: the model."""

    def load(self, model: str) -> LoadedModel:
        """Load the model in these formats."""
        loaded = load(self.source or model, CPU, self.dtype)
        found = build_fused(loaded) if self.weights == "auto" else to_quantized(loaded, self.weights)
        assert found is not None, "its fused forward pass is not the model"
        return found


VARIANTS = (
    Variant("float32", torch.float32),
    Variant("bfloat16", torch.bfloat16),
    Variant("int8 weights, bfloat16", torch.bfloat16, "int8"),
    Variant("int4 weights, bfloat16", torch.bfloat16, "int4"),
    Variant("int8 KV, bfloat16", torch.bfloat16, kv_dtype=torch.int8),
    Variant("int8 weights and KV, bfloat16", torch.bfloat16, "int8", torch.int8),
)


@dataclass(frozen=True)
class Quality:
    """`same_as`: per variant, the share of positions with the same most likely next token."""

    text: str
    variant: str
    tokens: int
    perplexity: float
    same_as_float32: float
    same_as_bfloat16: float


def corpus(tokenizer: Any, count: int) -> list[list[int]]:
    """Return windows of documents outside the training data."""
    sys.path.insert(0, str(DEMO))  # a folder of scripts
    from train import CHECK_SEED, rows

    return list(islice(rows(tokenizer, CHECK_SEED, WINDOW), count))


def file(tokenizer: Any, path: Path) -> list[list[int]]:
    """Return windows of a file, without a last one of less than half a window."""
    ids: list[int] = tokenizer(path.read_text(encoding="utf-8")).input_ids
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    return [window for window in windows if len(window) > WINDOW // 2]


def predictions(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], kv_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return, for all tokens but the first, the log-probability and the most likely token."""
    name = choose("auto", loaded.layers, BLOCK_SIZE, loaded.dtype, CPU, kv_dtype)
    backend = BACKENDS[name](loaded.layers, WINDOW // BLOCK_SIZE, BLOCK_SIZE, loaded.dtype, CPU, kv_dtype)
    loaded.attach(backend)
    blocks = np.arange(WINDOW // BLOCK_SIZE)
    scores, best = [], []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor(window)
            for start in range(0, len(ids) - 1, CHUNK):
                end = min(start + CHUNK, len(ids) - 1)
                used = blocks[: -(-end // BLOCK_SIZE)]
                backend.start_step(pack_chunks([Chunk(0, end - start, start, used)], BLOCK_SIZE))
                here = np.arange(start, end)
                logits = loaded.logits(ids, here, here, here - start).values
                scores.append(logits.double().log_softmax(-1).gather(1, ids[start + 1 : end + 1, None])[:, 0])
                best.append(logits.argmax(-1))
    return torch.cat(scores), torch.cat(best)


def measure(model: str, texts: dict[str, list[list[int]]], quantized: Sequence[Path] = ()) -> Iterator[Quality]:
    """Measure every variant on every text, also of `quantized` files."""
    yardsticks: dict[tuple[str, str], Tensor] = {}
    for variant in (*VARIANTS, *(Variant(path.name, torch.bfloat16, source=str(path)) for path in quantized)):
        loaded = variant.load(model)
        for text, windows in texts.items():
            scores, best = predictions(loaded, windows, variant.kv_dtype)
            yardsticks[text, variant.name] = best
            same = [
                (best == yardsticks.get((text, other), best)).double().mean().item()
                for other in ("float32", "bfloat16")
            ]
            yield Quality(text, variant.name, len(scores), math.exp(-scores.mean().item()), same[0], same[1])


def page(results: Sequence[Quality], title: str) -> str:
    """Return a Markdown page."""
    rows = [
        "| text | tokens | formats | perplexity | same token as float32 | as bfloat16 |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        as_bfloat16 = "-" if r.variant == "float32" else f"{r.same_as_bfloat16:.2%}"
        rows.append(
            f"| {r.text} | {r.tokens} | {r.variant} | {r.perplexity:.3f} | {r.same_as_float32:.2%} | {as_bfloat16} |"
        )
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"# {title}\n\n{installed}. Commit {commit()}.\n\n" + "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page; write it and the raw figures with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "model"))
    parser.add_argument("--quantized", type=Path, nargs="*", default=[], help="checkpoints and GGUF files made of it")
    parser.add_argument("--windows", type=int, default=24, help=f"of the corpus, {WINDOW} tokens each")
    parser.add_argument("--text", type=Path, nargs="*", default=[TOP / "LICENSE"])
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.jsonl")
    o = parser.parse_args(arguments)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(o.model, local_files_only=True, model_max_length=1 << 30)
    texts = {"unread documents of its corpus": corpus(tokenizer, o.windows)}
    texts |= {path.name: file(tokenizer, path) for path in o.text}
    results = list(measure(o.model, texts, o.quantized))
    place = Path(o.model).resolve()
    written = page(results, f"Quality of the formats: {place.parent.name}/{place.name}")
    print(written)
    if o.out is not None:
        o.out.with_suffix(".md").write_text(written)
        facts = {"commit": commit(), "machine": machine(), "versions": versions()}
        o.out.with_suffix(".jsonl").write_text("".join(json.dumps(asdict(r) | facts) + "\n" for r in results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
