"""Padded static batching with transformers: `generate` on left-padded waves, each until its longest answer ends.

    python demo/padded_waves.py --model DIR --slots 3

Loads the model and prints `{"threads": ..., "version": ...}`. Then reads {"prompts": [[text, max_tokens], ...]} from
standard input and prints the waves. A process of its own: it takes no time from a server while it waits for the line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

Prompt = tuple[str, int]
"""The text, and the number of tokens of its answer."""


def wave(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Generate one wave. Each answer keeps its own number of tokens; the rest of its row is padding."""
    batch = tokenizer([text for text, _ in prompts], return_tensors="pt", padding=True)
    longest = max(max_tokens for _, max_tokens in prompts)
    # Without an end-of-sequence token: the answers have fixed lengths.
    greedy = transformers.GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    found = model.generate(batch.input_ids, attention_mask=batch.attention_mask, generation_config=greedy)
    width = batch.input_ids.shape[1]
    return {
        "prompt_tokens": batch.attention_mask.sum(1).tolist(),
        "width": width,
        "token_ids": [row[width : width + n].tolist() for row, (_, n) in zip(found, prompts, strict=True)],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model, report that it is ready, and run the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True, help="prompts of a wave")
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's choice")
    o = parser.parse_args(arguments)
    if o.threads:
        torch.set_num_threads(o.threads)
    transformers.utils.logging.disable_progress_bar()
    local = {"local_files_only": True}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(o.model), padding_side="left", **local)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(o.model), dtype=torch.float32, **local).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=None)
    with torch.inference_mode():
        wave(model, tokenizer, [("The capital of France is", 8)] * o.slots)
        print(json.dumps({"threads": torch.get_num_threads(), "version": transformers.__version__}), flush=True)
        if not (line := sys.stdin.readline()):
            return 1
        prompts: list[Prompt] = json.loads(line)["prompts"]
        waves, began_at = [], time.perf_counter()
        for start in range(0, len(prompts), o.slots):
            waves.append(wave(model, tokenizer, prompts[start : start + o.slots]))
        seconds = time.perf_counter() - began_at
    print(json.dumps({"seconds": seconds, "waves": waves}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
