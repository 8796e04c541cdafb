"""Serve a tiny model as two ranks with a GPU each would, without one: fused pass, captured graphs, collectives in both.

    TRITON_INTERPRET=1 python -m support.divided_card FAMILY

The kernels are interpreted, gloo stands for NCCL, and a replay computes again. Both ranks run this module; rank 0
prints a JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.worker.device.staging import Staging
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.division import load_divided
from lineclear.worker.model.loader import build_cuda, wrap_model
from lineclear.worker.runner import input_batch, launched_step
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.rank_runner import FollowingRunner, LeadingRunner, follow
from lineclear.worker.sampling import logits, truncation
from lineclear.worker.tensor_parallel.ranks import Ranks

from .divided_models import FUSED, model_of, requests
from .graphs import recorded
from .inprocess import InProcess
from .launches import copied

_OPTIONS = RunnerOptions(num_blocks=64, num_slots=4, max_step_tokens=64, attention_backend="triton_paged")
_LIMITS = CoreLimits(max_batch_size=4, target_batch_tokens=16, prefix_cache=False)


def pretend_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps stage their arrays, and results arrive by copies, as on a GPU."""
    monkeypatch.setattr(input_batch, "Staging", lambda device, size: Staging(device, size, is_direct=False))
    for module in (logits, truncation):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(launched_step.StepTimer, "stop", lambda timer: False)
    monkeypatch.setattr(launched_step, "to_host", copied)


def some_requests() -> Iterator[Request]:
    for request in requests():
        if request.request_id in ("greedy-0", "greedy-2", "sampled-1"):
            yield replace(request, max_tokens=4)


def main(family: str) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(2, [sys.executable, "-m", "support.divided_card", family])
    ranks.connect(torch.device("cpu"))
    found: dict[str, Any] = {}
    if not ranks.rank:
        found["whole"] = InProcess(ModelRunner(wrap_model(model_of(FUSED + family))), _LIMITS).serve(some_requests())
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_card(monkeypatch)
        loaded = build_cuda(load_divided(ranks, lambda: model_of(FUSED + family), wrap_model), ranks.agree)
        graphs = DecodeGraphs([1, 4], recorded, ranks.agree)
        if ranks.rank:
            follow(FollowingRunner(ranks, loaded, _OPTIONS, graphs), ranks)
            return
        runner = LeadingRunner(ranks, loaded, _OPTIONS, graphs=graphs)
        found["divided"] = InProcess(runner, _LIMITS).serve(some_requests())
    heads = {spec.num_kv_heads for spec in loaded.layers}
    ends = {"is_fused": loaded.decoder is not None, "replays": graphs.num_replays, "kv_heads": sorted(heads)}
    print(json.dumps(found | ends), flush=True)
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
