"""Compares greedy answers of the worker with transformers `generate` on the same device, after the worker's self-test.

    python -m bench.gpu_equality --device cuda --family llama --out FILE

For small random models of three families, in float32 and in bfloat16. A difference in bfloat16 may be a tie: the sums
of a batch have another order. It is one if transformers' own logits of both tokens are nearly equal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bench.figures import Figure, arguments
from bench.gpu_device import Device, each, main
from bench.gpu_sizes import FAMILIES
from bench.models import build_family
from bench.slots import Slots
from lineclear.process.logging_setup import configure
from lineclear.worker.runner.runner_factory import make_runner
from lineclear.worker.settings import load

TIE = {"float32": 0.01, "bfloat16": 0.3}
"""Largest gap to the best logit, in standard deviations of the logits: as in the worker's self-test."""


class Answer(NamedTuple):
    """What transformers answers: tokens, and the logits of each [tokens, vocabulary] on the host."""

    tokens: list[int]
    logits: torch.Tensor


def prompts(device: Device, vocab_size: int) -> list[tuple[int, ...]]:
    """Return prompts of different lengths and tokens."""
    return [tuple(3 + (n * 37 + i * 11) % (vocab_size - 3) for i in range(n)) for n in device.sizes.prompt_lens]


def answers_of_worker(directory: Path, device: Device, dtype: str, folder: Path) -> tuple[list[list[int]], float, str]:
    """Return the answers to all prompts in one batch, the seconds to make the runner, and its attention backend."""
    flags = ["--model", str(directory), "--device", str(device.torch_device), "--dtype", dtype]
    flags += [
        "--socket-directory",
        str(folder),
        "--num-blocks",
        "512",
        "--max-batch-size",
        str(len(device.sizes.prompt_lens)),
    ]
    began_at = time.perf_counter()
    runner = make_runner(load([*flags, "--target-batch-tokens", "512"]))
    seconds = time.perf_counter() - began_at
    slots = Slots(runner)
    columns = [slots.open(prompts(device, runner.capacity.vocab_size))]
    columns += [list(result.tokens) for result in slots.decode(len(columns[0]), device.sizes.answer_len - 1).results]
    return [list(answer) for answer in zip(*columns, strict=True)], seconds, runner.backend_name


def answers_of_transformers(directory: Path, device: Device, dtype: str) -> Iterator[Answer]:
    """Answer each prompt alone, with transformers' own attention."""
    dtypes: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(directory, **dtypes)
    model.to(device.torch_device)
    model.generation_config.eos_token_id = None
    for prompt in prompts(device, model.config.vocab_size):
        ids = torch.tensor([prompt], device=device.torch_device)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=device.sizes.answer_len,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(found.logits).to("cpu", torch.float32)
        yield Answer(found.sequences[0, ids.shape[1] :].tolist(), logits)


def is_tie(answer: Answer, tokens: Sequence[int], largest: float) -> bool:
    """Return whether the first difference of `tokens` from the answer is a tie."""
    at = next(i for i in count() if answer.tokens[i] != tokens[i])
    logits = answer.logits[at]
    return float((logits.max() - logits[tokens[at]]) / logits.std()) <= largest


def compare(directory: Path, device: Device, dtype: str) -> Iterator[Figure]:
    """Compare the answers in one number format."""
    ours, seconds, backend = answers_of_worker(directory, device, dtype, directory.parent)
    case = f"{directory.name}, {dtype}, {backend}"
    yield Figure("self-test: passed, with the load before", case, seconds, "s")
    theirs = list(answers_of_transformers(directory, device, dtype))
    differing = [(a, b) for a, b in zip(theirs, ours, strict=True) if a.tokens != b]
    yield Figure("equality: answers", case, len(theirs), "answers")
    is_exact = dtype == "float32"
    yield Figure("equality: answers that differ", case, len(differing), "answers", 0 if is_exact else None)
    wrong = sum(not is_tie(a, b, TIE[dtype]) for a, b in differing)
    yield Figure("equality: differences that are no ties", case, wrong, "answers", 0)


def figures(device: Device, options: argparse.Namespace) -> Iterator[Figure]:
    """Compare one family in both number formats."""
    configure("worker", "warning")
    with tempfile.TemporaryDirectory() as folder:
        directory = build_family(options.family, Path(folder))
        yield from each(compare(directory, device, dtype) for dtype in TIE)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--family", choices=FAMILIES, required=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
