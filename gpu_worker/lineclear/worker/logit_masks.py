"""Applies the masks of structured output to the logits of the constrained rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .grammar_constraints import Masks
from .logits import Logits, with_argmax
from .mask_threads import Bits
from .staging import to_device


@torch.inference_mode()
def apply_masks(logits: Logits, masks: Masks) -> Logits:
    """Set the logits of tokens that are not allowed to -inf, in place. Other rows are not touched."""
    if not masks.rows:
        return logits
    values = logits.values
    rows = to_device(np.array(masks.rows, np.int64), values.device)
    banned = _banned(masks.bits, values.shape[1], values.device)
    if len(masks.rows) == len(values):
        values.masked_fill_(banned, float("-inf"))
        return with_argmax(values)
    constrained = with_argmax(values.index_select(0, rows).masked_fill_(banned, float("-inf")))
    values.index_copy_(0, rows, constrained.values)
    max_values = logits.max_values.index_copy(0, rows, constrained.max_values)
    max_ids = logits.max_ids.index_copy(0, rows, constrained.max_ids)
    host_max = (max_values.tolist(), max_ids.tolist()) if logits.host_max is not None else None
    bad = None
    if logits.bad is not None and constrained.bad is not None:
        bad = logits.bad.index_copy(0, rows, constrained.bad)
    return Logits(values, max_values, max_ids, host_max, bad)


def _banned(bits: Bits, vocabulary: int, device: torch.device) -> Tensor:
    """Return [num_rows, vocabulary] bool."""
    if device.type == "cpu":
        columns = np.unpackbits((~bits).astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(columns[:, :vocabulary].view(np.bool_))
    words = to_device(bits.view(np.int32), device)
    shifts = torch.arange(32, device=device, dtype=torch.int32)
    return ((words[:, :, None] >> shifts & 1) == 0).flatten(1)[:, :vocabulary]
