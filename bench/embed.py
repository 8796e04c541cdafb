"""Measures what Embed and Score cost beside streams, and how far their values are from transformers'.

    python -m bench.embed --model DIR [--streams 16] [--embeddings 64] [--turns 3] [--dtypes float32 bfloat16]

Gaps are times between two messages of a stream, from the first call of Embed to its last response. In `alone` turns the
streams run for as long without it. Differences are the largest over log-probabilities, and over elements of vectors
of length 1; `noise` is that of transformers itself between bfloat16 and float32.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.figures import Figure, arguments, main, scaled
from bench.measure import median, percentile
from lineclear.client import Client, LocalServer

_TOKENS, _PROMPT, _WARM = 128, 64, 8
_CONTINUATION = 8
_PLAIN: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0, "omit_text": True}
_MOST_TOKENS = 3000
"""Of a stream, or what the context leaves."""
_IDS = 3000
"""Token ids are below it, in any vocabulary."""


def prompt(rng: random.Random, length: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(3, _IDS) for _ in range(length)]


class Streams:
    """Streams that run together; `gaps` has the end and the length of each gap in seconds."""

    def __init__(self, target: str, count: int, rng: random.Random) -> None:
        self.gaps: list[tuple[float, float]] = []
        with Client(target) as client:
            self._max_tokens = min(_MOST_TOKENS, client.model().context_length - _PROMPT - 1)
        self._stop, self._ready = threading.Event(), threading.Barrier(count + 1)
        prompts = [prompt(rng, _PROMPT) for _ in range(count)]
        self._threads = [threading.Thread(target=self._read, args=(target, entry)) for entry in prompts]
        for thread in self._threads:
            thread.start()
        self._ready.wait()

    def _read(self, target: str, entry: list[int]) -> None:
        with Client(target) as client, client.stream(entry, max_tokens=self._max_tokens, **_PLAIN) as stream:
            last, count = 0.0, 0
            for delta in stream:
                if not delta.token_ids:
                    continue
                now, count = time.perf_counter(), count + 1
                if count > 1:
                    self.gaps.append((now, now - last))
                last = now
                if count == _WARM:
                    self._ready.wait()
                if self._stop.is_set():
                    break

    def between(self, begin: float, end: float) -> list[float]:
        """Stop, and return the gaps that ended in this time."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return [gap for at, gap in self.gaps if begin <= at <= end]


def turn(target: str, options: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """Measure streams beside Embed, then streams alone for as long, then Embed alone. Seconds."""
    found: dict[str, float] = {}
    inputs = [[prompt(rng, _TOKENS) for _ in range(options.embeddings)] for _ in range(2)]
    with Client(target) as client:
        streams = Streams(target, options.streams, rng)
        begin = time.perf_counter()
        client.embed(inputs[0])
        end = time.perf_counter()
        gaps = {"beside": streams.between(begin, end)}
        found["embed beside"] = end - begin
        streams = Streams(target, options.streams, rng)
        begin = time.perf_counter()
        time.sleep(max(2.0, found["embed beside"]))
        gaps["alone"] = streams.between(begin, time.perf_counter())
        begin = time.perf_counter()
        client.embed(inputs[1])
        found["embed alone"] = time.perf_counter() - begin
    for kind, values in gaps.items():
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            found[f"{kind} {name}"] = percentile(values, share) or 0.0
    return found


@torch.inference_mode()
def reference(model: Path, dtype: torch.dtype, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the last tokens, and the vectors of length 1 of the last token."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    scores, vectors = [], []
    for entry in prompts:
        ids = torch.tensor([entry])
        logprobs = torch.log_softmax(loaded(ids).logits[0].float(), dim=-1)
        scores.append(logprobs[-_CONTINUATION - 1 : -1].gather(1, ids[0, -_CONTINUATION:, None])[:, 0])
        hidden = getattr(loaded, loaded.base_model_prefix)(ids).last_hidden_state[0, -1].float()
        vectors.append(torch.nn.functional.normalize(hidden, dim=0))
    return torch.stack(scores), torch.stack(vectors)


def differences(model: Path, dtype: str) -> Iterator[Figure]:
    """Compare a server with transformers of the same dtype, and both with transformers in float32."""
    rng = random.Random(5)
    prompts = [prompt(rng, 40 + 7 * i) for i in range(12)]
    with LocalServer("--model", str(model), "--", "--dtype", dtype) as server, Client(server.target) as client:
        calls = [client.score(entry[:-_CONTINUATION], [entry[-_CONTINUATION:]]) for entry in prompts]
        scores = torch.tensor([[x.logprob for x in call.scores[0].logprobs] for call in calls])
        vectors = torch.tensor(client.embed(prompts).vectors)
    ours, exact = scores, reference(model, torch.float32, prompts)
    same = exact if dtype == "float32" else reference(model, getattr(torch, dtype), prompts)
    case = f"{model.resolve().name}, {dtype}"
    rows = [("transformers", (ours, vectors), same)]
    if dtype != "float32":
        rows += [("transformers in float32", (ours, vectors), exact), ("noise", same, exact)]
    for name, (left_scores, left_vectors), (right_scores, right_vectors) in rows:
        yield Figure(f"score: difference, {name}", case, float((left_scores - right_scores).abs().max()), "nats")
        yield Figure(f"embed: difference, {name}", case, float((left_vectors - right_vectors).abs().max()), "")


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the gaps in turns, then the differences for each dtype."""
    name, rng = options.model.resolve().name, random.Random(1)
    case = f"{name}, {options.embeddings} of {_TOKENS} tokens, {options.streams} streams"
    if options.turns:
        with LocalServer("--model", str(options.model), *options.server_flags) as server:
            turn(server.target, options, rng)  # the step-time model and the kernels are warm then
            turns = [turn(server.target, options, rng) for _ in range(options.turns)]
        for key in turns[0]:
            kind = "embed: seconds" if key.startswith("embed") else "streams: gap"
            unit, factor = ("s", 1.0) if key.startswith("embed") else ("ms", 1e3)
            yield Figure(f"{kind}, {key}", case, scaled(median([found[key] for found in turns]), factor), unit)
    for dtype in options.dtypes:
        yield from differences(options.model, dtype)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "demo" / "model")
    found.add_argument("--streams", type=int, default=16)
    found.add_argument("--embeddings", type=int, default=64)
    found.add_argument("--turns", type=int, default=3)
    found.add_argument("--dtypes", nargs="*", default=[])
    found.add_argument("--server-flags", nargs="*", default=[])
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
