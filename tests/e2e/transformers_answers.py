"""Greedy answers of transformers to requests of the core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lineclear.scheduler.core.sequence import Request


def generated(model: Any, requests: Iterable[Request], **options: Any) -> dict[str, list[int]]:
    """Return what `model.generate` answers, by the ids of the requests. `options` say which tokens end an answer."""
    found = {}
    for request in requests:
        ids = torch.tensor([request.prompt])
        lengths = {"max_new_tokens": request.max_tokens, "attention_mask": torch.ones_like(ids)}
        output = model.generate(ids, do_sample=False, **lengths, **options)
        found[request.request_id] = output[0, ids.shape[1] :].tolist()
    return found
