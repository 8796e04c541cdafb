"""`--deterministic`: tokens and log-probabilities are bitwise those of the request alone, on each path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from support.kernel_variants import needs_kernels

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Logprobs, Row, Sampling
from lineclear.worker.cpu import linear
from lineclear.worker.cpu.linear import pack_by_row
from lineclear.worker.decoder.decoder_layers import FAMILIES
from lineclear.worker.drafts.verification import Drafts, ReadTokens
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, to_quantized, wrap_model
from lineclear.worker.runner import deterministic
from lineclear.worker.runner.deterministic import DeterministicRunner, OneTokenRunner, runner_type
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.sampling.sampling_metadata import SamplingTable

VOCAB_SIZE = 211  # no multiple of the elements that torch computes at once, so that the end of a row is special
SIZES = WIDE | {"vocab_size": VOCAB_SIZE}
KINDS = (
    Sampling(logprobs=5),
    Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, logprobs=20),
    Sampling(temperature=1.0, logprobs=0, logprob_ids=(3, 5)),
    Sampling(temperature=0.9, dynatemp_range=0.5, dynatemp_exponent=0.7, typical_p=0.9, logprobs=2),
    Sampling(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.05, top_n_sigma=2.0),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, dry_multiplier=0.8, logprobs=3),
)
LENGTHS = (5, 1, 17, 33, 64, 90)
MAX_TOKENS = 20
FORMATS = (torch.float32, torch.bfloat16)
LIMITS = CoreLimits(max_batch_size=48, target_batch_tokens=512, prefix_cache=False)
Answers = dict[str, tuple[list[int], list[Logprobs]]]


def requests(name: str = "", kinds: Sequence[Sampling] = KINDS) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for index, length in enumerate(LENGTHS):
        prompt = tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())
        sampling = replace(kinds[index % len(kinds)], seed=index)
        made.append(Request(f"{name}{index}", prompt, sampling, MAX_TOKENS, max_drafts=3))
    return made


def mates(count: int, kinds: Sequence[Sampling] = KINDS) -> list[Request]:
    """Return requests of other lengths and kinds."""
    generator, made = torch.Generator().manual_seed(8), []
    for index in range(count):
        prompt = tuple(torch.randint(3, VOCAB_SIZE, (1 + 5 * (index % 9),), generator=generator).tolist())
        made.append(Request(f"mate-{index}", prompt, replace(kinds[index % len(kinds)], seed=99 + index), 12))
    return made


class Drafter:
    """Drafts the tokens of known sequences; some of its drafts are wrong."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [list(sequence) for sequence in sequences]

    def reset(self) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        found = {}
        for row in rows:
            known = read_tokens(row.slot, 0, row.start + 1)
            right = next((x[len(known) :] for x in self._sequences if x[: len(known)] == known), [])
            wrong = len(known) % 3
            found[row.slot] = [*right[:wrong], 7, *right[wrong + 1 :]][: row.num_drafts]
        return found


@dataclass
class Path:
    loaded: LoadedModel
    runner: Callable[..., ModelRunner]
    kv_dtype: torch.dtype | None = None
    backend: str = "auto"
    num_mates: int = 40
    """More than torch computes at once."""

    def server(self, limits: CoreLimits = LIMITS, num_blocks: int = 400, **parts: Any) -> InProcess:
        options = RunnerOptions(
            num_blocks=num_blocks,
            num_slots=48,
            max_step_tokens=512,
            kv_dtype=self.kv_dtype,
            attention_backend=self.backend,
        )
        return InProcess(self.runner(self.loaded, options, **parts), limits)

    def differing(self, kinds: Sequence[Sampling] = KINDS) -> Iterator[str]:
        """Yield the situations that change a bit of an answer."""
        alone, server = Answers(), self.server()
        for request in requests(kinds=kinds):
            alone |= answers(server, [replace(request, max_drafts=0)], [request])
        drafter = Drafter([x.prompt + tuple(alone[x.request_id][0]) for x in requests(kinds=kinds)])
        yield from (name for name, found in self._situations(kinds, drafter) if found != alone)

    def _situations(self, kinds: Sequence[Sampling], drafter: Drafter) -> Iterator[tuple[str, Answers]]:
        own, others = requests(kinds=kinds), mates(self.num_mates, kinds)
        yield "batch", answers(self.server(), [*others[:4], *own, *others[4:]], own)
        chunks = self.server(replace(LIMITS, target_batch_tokens=7, max_batch_size=5))
        yield "chunks", answers(chunks, own, own)
        assert any(1 < row.num_tokens < 7 for plan in chunks.plans for row in plan.rows)
        preempted = self.server(replace(LIMITS, max_batch_size=8, target_batch_tokens=40), num_blocks=10)
        yield "preemption", answers(preempted, [*own, *others[:5]], own)
        assert preempted.counters.preemptions > 0
        cached = self.server(replace(LIMITS, prefix_cache=True, adaptive_drafts=False), drafter=drafter)
        answers(cached, [replace(x, request_id=f"first-{x.request_id}") for x in own], [])
        yield "cache", answers(cached, own, own)
        assert cached.finished("4").stats.cached_tokens > 60
        assert cached.counters.spec_decode_num_accepted_tokens > 0
        # Prompts of one step share blocks that another one's row of this step writes.
        same = [replace(x, request_id=f"same-{x.request_id}") for x in own]
        yield "one step", answers(self.server(replace(LIMITS, prefix_cache=True)), [*same, *own], own)
        lost = self.server()
        yield "loss", answers(lost, own, own, lose_worker_after_steps=9)
        assert lost.finished("3").stats.recoveries == 1


def answers(server: InProcess, served: list[Request], wanted: list[Request], **options: Any) -> Answers:
    tokens = server.serve(served, **options)
    return {x.request_id: (tokens[x.request_id], server.logprobs(x.request_id)) for x in wanted}


def fused(family: str, dtype: torch.dtype, **changes: Any) -> LoadedModel:
    loaded = build_fused(wrap_model(tiny_model(family, dtype=dtype, **SIZES | changes)), pack_by_row)
    assert loaded is not None
    assert loaded.decoder is not None
    return loaded


@needs_kernels
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        *((family, FORMATS[at % 2], None) for at, family in enumerate(sorted(FAMILIES - {"llama", "ministral3"}))),
        *(("llama", dtype, torch.int8) for dtype in FORMATS),
    ],
)
def test_fused_pass(family: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Gemma 3 has windows, whose keys a chunk reads from another position on than a decode."""
    assert not [*Path(fused(family, dtype), DeterministicRunner, kv_dtype).differing()]


@needs_kernels
@pytest.mark.parametrize(
    ("form", "dtype", "kv_dtype"),
    [("int8", torch.bfloat16, None), ("int8", torch.float32, torch.int8), ("int4", torch.bfloat16, None)],
)
def test_quantized_weights(form: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    loaded = to_quantized(wrap_model(tiny_model("mistral", dtype=dtype, **SIZES)), form)
    assert not [*Path(loaded, DeterministicRunner, kv_dtype).differing()]


@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    [
        ("gemma2", torch.float16, "auto"),
        ("gpt2", torch.float32, "torch_paged"),
    ],
)
def test_modules_of_transformers(family: str, dtype: torch.dtype, backend: str) -> None:
    loaded = wrap_model(tiny_model(family, dtype=dtype))
    assert runner_type(loaded, threads=1) is OneTokenRunner
    assert not [*Path(loaded, OneTokenRunner, backend=backend, num_mates=5).differing()]


@needs_kernels
def test_products_of_torch_are_found() -> None:
    loaded = build_fused(wrap_model(tiny_model("llama", **SIZES)), linear.leave_unpacked, keep_weights=True)
    assert loaded is not None
    assert next(Path(loaded, DeterministicRunner).differing(), None)


@needs_kernels
def test_sampling_of_rows_together_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of several equal logits are reported depends on how many another row wants."""
    monkeypatch.setattr(deterministic, "SamplingTableByRow", SamplingTable)
    kinds = Sampling(logprobs=2), Sampling(logprobs=20)
    assert next(Path(fused("llama", torch.bfloat16), DeterministicRunner).differing(kinds), None)


def test_batches_of_transformers_modules_are_found() -> None:
    assert next(Path(wrap_model(tiny_model("gpt2")), DeterministicRunner).differing(), None)
