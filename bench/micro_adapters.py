"""Measures decode steps in which rows use LoRA adapters.

    python -m bench.micro_adapters --model DIR [--rank 16] [--rows 1 16]

Steps of 1 and 16 rows with no adapter loaded, with four loaded and none used, and with one, two and four used by all
rows, in turns. The adapters change all seven kinds of linear layers. For models with the fused forward pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.figures import Figure, arguments, main
from bench.measure import median
from bench.micro_step import Bench
from lineclear.model_files import adapter_files
from lineclear.process.logging_setup import configure
from lineclear.wire.messages import Sampling, SlotInit
from lineclear.worker.settings import load

CASES = {
    "none loaded": (0, 0),
    "four loaded, none used": (4, 0),
    "one used": (4, 1),
    "two used": (4, 2),
    "four used": (4, 4),
}
"""Adapters that are loaded and used."""
_STEPS, _TURNS, CONTEXT = 40, 3, 32


def write_adapter(directory: Path, model: Path, rank: int, seed: int) -> None:
    """Write a random adapter of all linear layers for a model of the Llama architecture."""
    config = json.loads((model / "config.json").read_text())
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    key_width = dim * config.get("num_key_value_heads", heads)
    shapes = {
        "self_attn.q_proj": (hidden, dim * heads),
        "self_attn.k_proj": (hidden, key_width),
        "self_attn.v_proj": (hidden, key_width),
        "self_attn.o_proj": (dim * heads, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{path}A.weight"] = torch.randn(rank, inputs) * 0.01
            tensors[f"{path}B.weight"] = torch.randn(outputs, rank) * 0.01
    directory.mkdir()
    save_file(tensors, directory / adapter_files.WEIGHTS)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / adapter_files.CONFIG).write_text(json.dumps(settings))


def step_seconds(bench: Bench, count: int, num_used: int, adapters: list[Path]) -> float:
    """Return the median seconds of a step of `count` decodes."""
    bench.clear(count)
    for index, path in enumerate(adapters, 1):
        bench.runner.load_adapter(index, adapter_files.read(path, 1024).key, str(path))
    for slot in range(count):
        tokens = tuple(64 + (slot * 31 + i * 7) % 3000 for i in range(CONTEXT))
        adapter = 1 + slot % num_used if num_used else 0
        bench.run([(slot, CONTEXT)], (SlotInit(slot, tokens, CONTEXT, (), Sampling(), adapter),))
    rows = [(slot, 1) for slot in range(count)]
    bench.run(rows)
    return median([bench.run(rows) for _ in range(_STEPS)])


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure every case for both numbers of rows, in turns."""
    configure("worker", "warning")
    flags = ["--model", str(options.model), "--socket-directory", "unused", "--num-blocks", "1024", *options.flags]
    bench = Bench(load(flags))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(4)]
        for number, path in enumerate(paths):
            write_adapter(path, options.model, options.rank, number)
        for count in options.rows:
            times: dict[str, list[float]] = {case: [] for case in CASES}
            for _ in range(_TURNS):
                for case, (num_loaded, num_used) in CASES.items():
                    times[case].append(step_seconds(bench, count, num_used, paths[:num_loaded]))
            for case, seconds in times.items():
                yield Figure("adapters: step", f"{count} decodes at {CONTEXT}, {case}", median(seconds) * 1e3, "ms")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--rank", type=int, default=16)
    found.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    found.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the worker; must come last")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
