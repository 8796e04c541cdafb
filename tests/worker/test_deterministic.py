"""What `--deterministic` refuses, and the parts of a worker that it changes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import needs_kernels
from torch import nn
from worker.settings_runner import runner_with

from lineclear.process.settings_base import ConfigurationError
from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, SlotInit
from lineclear.wire.sampling import Sampling
from lineclear.worker.cpu.rotary_cache import RotaryCache
from lineclear.worker.decoder.decoder_layers import Rotary
from lineclear.worker.kernels.native_library import NONE
from lineclear.worker.model.loaded_model import ModelForward
from lineclear.worker.runner import runner_factory
from lineclear.worker.runner.deterministic import DeterministicRunner, OneTokenRunner
from lineclear.worker.runner.input_batch import OutputRow
from lineclear.worker.runner.model_runner import ModelRunner
from lineclear.worker.runner.scores_and_vectors import ReportedRows, RowOutputs, RowOutputsByRow
from lineclear.worker.sampling.logits import Logits, with_argmax

CPU = torch.device("cpu")


@needs_kernels
def test_runner_and_fingerprint_follow_the_setting(tmp_path: Path) -> None:
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    runners = [
        runner_with(tmp_path),
        runner_with(tmp_path, deterministic=True, threads=0),
        runner_with(tmp_path, deterministic=True, fused_forward=False),
        runner_with(tmp_path, deterministic=True, fused_forward=False, threads=2),
        runner_with(tmp_path, deterministic=True, cpu_kernels=NONE),
    ]
    kinds = [ModelRunner, DeterministicRunner, OneTokenRunner, OneTokenRunner, OneTokenRunner]
    assert [type(runner) for runner in runners] == kinds
    assert len({runner.hello(1).model_fingerprint for runner in runners}) == len(runners)


@needs_kernels
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"attention_backend": "torch_paged"}, r"torch_paged.*--attention-backend native"),
        ({"block_size": 8}, r"torch_paged.*multiple of 16"),
        ({"fused_forward": False, "threads": 0}, r"llama in float32.*set --threads"),
    ],
)
def test_combinations_are_refused(tmp_path: Path, flags: dict[str, object], sentence: str) -> None:
    tiny_model("llama", **WIDE).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"--deterministic: .*{sentence}"):
        runner_with(tmp_path, deterministic=True, **flags)


def test_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_factory, "_take_device", lambda settings, share: (torch.device("cuda"), share))
    with pytest.raises(ConfigurationError, match=r"products on cuda .*set --device cpu"):
        runner_with(tmp_path, deterministic=True)


def test_rotary_embeddings_do_not_depend_on_threads() -> None:
    def rotary(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * torch.linspace(0.01, 1, 72)
        return angles.cos(), angles.sin()

    module = nn.Module()
    module.forward = rotary

    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        cache = RotaryCache(Rotary(module, None, slice(None)), torch.float32, 3000)
        cache.extend(3000)
        found.append((cache.cosine, cache.sine))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def reported(outputs: RowOutputs, rows: list[OutputRow], states: torch.Tensor, head: torch.Tensor) -> ReportedRows:
    def logits(places: np.ndarray) -> Logits:
        return with_argmax(torch.stack([states[place] @ head for place in places.tolist()]))

    return outputs.compute(tuple(rows), ModelForward(logits, lambda places: states[places]))


def in_chunks(kind: type[RowOutputs], ends: list[int]) -> tuple[list[float], list[int], list[float]]:
    """Return the scores, top ids and vector of a prompt computed in chunks, beside a row that wants more."""
    torch.manual_seed(3)
    states, head = torch.randn(200, 48), torch.randn(48, 211).bfloat16().float()
    head[:, 100:120] = head[:, 80:100]  # equal logits
    outputs = kind(torch.arange(1000), CPU)
    pooling = Pooling(PoolingKind.MEAN)
    inits = [
        SlotInit(0, (1,) * 200, 200, (), Sampling(), num_top_scores=1),
        SlotInit(1, (1,) * 200, 200, (), Sampling(), pooling=pooling),
        SlotInit(2, (1,) * 200, 200, (), Sampling(), num_top_scores=20),
    ]
    outputs.set_slots(inits)
    scores, ids, vector = list[float](), list[int](), list[float]()
    for start, end in pairwise([0, *ends]):
        count = end - start
        rows = [
            OutputRow(RowOutput.SCORE, 0, start, count, start, is_last=end == 200),
            OutputRow(RowOutput.POOL, 1, start, count, start, is_last=end == 200),
            *([OutputRow(RowOutput.SCORE, 2, start, count, start, is_last=False)] if len(ends) > 1 else []),
        ]
        got = reported(outputs, rows, states, head)
        assert got.scores is not None
        scores += got.scores.logprobs[:count].tolist()
        ids += got.scores.top_ids[:count, 0].tolist()
        vector = [] if got.vectors[0] is None else got.vectors[0].tolist()
    return scores, ids, vector


def test_scores_and_vectors_do_not_depend_on_chunks_and_other_rows() -> None:
    whole = in_chunks(RowOutputsByRow, [200])
    assert whole == in_chunks(RowOutputsByRow, [7, 64, 65, 180, 200])
    assert whole[2] != in_chunks(RowOutputs, [7, 64, 65, 180, 200])[2], "and the sums of pieces do"
