"""Drafts by a draft model: a smaller model of the same vocabulary continues each sequence greedily.

(Speculative decoding, Leviathan et al. 2023; vLLM's draft_model.) The draft model has keys and values of its own, in
cells with the numbers of the served model's: the block table of a slot holds for both. They are computed when a slot
drafts for the first time, from its tokens, so that preemption, resume and a lost worker need no care (law 2).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lineclear.wire.messages import Row
from lineclear.worker.attention.base import Chunk, Indices, IntArray, pack_chunks
from lineclear.worker.attention.registry import BACKENDS, choose
from lineclear.worker.device.staging import Staging, fetch
from lineclear.worker.drafts.verification import Drafter, Drafts, PendingDrafts, ReadTokens
from lineclear.worker.model.loaded_model import LoadedModel, ModelRefused

from .input_batch import InputBatch

_MAX_BEHIND = 16
"""Positions that the first pass of a step computes together with the last known token."""
_STAGED_PASSES, _STAGED_BYTES = 64, 1 << 18
"""Passes whose arrays may be on their way to the device, and the bytes of one. Longer block tables are copied alone."""


class DraftModelDrafter(Drafter):
    """Drafts by a draft model for the slots of `batch`; a step catches up on `max_catch_up` positions at most."""

    def __init__(self, loaded: LoadedModel, batch: InputBatch, max_catch_up: int) -> None:
        """Allocate the KV pool of the draft model: as many blocks as the served model has."""
        c = batch.capacity
        kind = loaded.layers, c.block_size, loaded.dtype, loaded.device
        self._loaded, self._batch = loaded, batch
        self._backend = BACKENDS[choose("auto", *kind)](loaded.layers, c.num_blocks, *kind[1:])
        is_direct = batch.staging.is_direct
        self._staging = Staging(batch.device, _STAGED_BYTES, _STAGED_PASSES, is_direct=is_direct)
        self._backend.put = self._staging.put
        loaded.attach(self._backend)
        self._max_catch_up = max_catch_up
        self._computed: dict[int, int] = {}  # slot -> leading positions whose keys and values are computed
        self._drafted: dict[int, tuple[int, Sequence[int]]] = {}  # slot -> first position and drafts with such values

    def reset(self) -> None:
        self._computed.clear()
        self._drafted.clear()

    def forget(self, slot: int) -> None:
        self._computed.pop(slot, None)
        self._drafted.pop(slot, None)

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        # Its positional embeddings may end before those of the served model.
        rows = [row for row in rows if row.start + row.num_drafts <= self._loaded.max_model_len]
        blocks_of = self._batch.slots.blocks_of
        tables = {x.slot: np.concatenate((blocks_of(x.slot), np.array(x.new_blocks, np.int64))) for x in rows}
        for row in rows:
            self._drop_rejected(row, read_tokens)
        left, ready = self._max_catch_up, list[Row]()
        for row in rows:
            left -= self._catch_up(row, tables[row.slot], left)
            if row.start - self._computed.get(row.slot, 0) < _MAX_BEHIND:
                ready.append(row)
        drafts = self._draft(ready, tables)
        for row in ready:
            self._drafted[row.slot] = row.start + 1, drafts[row.slot]
            self._computed[row.slot] = row.start + row.num_drafts
        return drafts

    def _drop_rejected(self, row: Row, read_tokens: ReadTokens) -> None:
        """Count only positions as computed whose tokens were accepted."""
        if row.slot not in self._drafted:
            return
        first, drafts = self._drafted.pop(row.slot)
        known, count = read_tokens(row.slot, first, min(first + len(drafts), row.start + 1)), 0
        while count < len(known) and known[count] == drafts[count]:
            count += 1
        self._computed[row.slot] = min(self._computed[row.slot], first + count, row.start)

    def _catch_up(self, row: Row, blocks: IntArray, most: int) -> int:
        """Compute up to `most` positions before that of the row, if it lags far behind. Returns how many.

        Whole blocks: the pool zeroes a block that is begun and not filled, and others may share it.
        """
        start, size = self._computed.get(row.slot, 0), self._batch.capacity.block_size
        if row.start - start < _MAX_BEHIND:
            return 0
        end = row.start if row.start - start <= most else (start + most) // size * size
        piece = max(self._batch.capacity.max_step_tokens // size * size, size)
        for first in range(start - start % piece, end, piece):
            begin, stop = max(first, start), min(first + piece, end)
            if begin < stop:
                self._forward([(row.slot, begin, stop)], {row.slot: blocks}, is_draft=False)
                self._computed[row.slot] = stop
        return max(0, end - start)

    def _draft(self, rows: Sequence[Row], tables: dict[int, IntArray]) -> dict[int, Sequence[int]]:
        """Return the drafts of each row, made in as many passes as the longest has."""
        passes: list[tuple[list[int], Tensor]] = []
        for n in range(max((row.num_drafts for row in rows), default=0)):
            active = [row for row in rows if row.num_drafts > n]
            spans = [(x.slot, x.start + n if n else self._computed.get(x.slot, 0), x.start + n + 1) for x in active]
            # Chunks of one query come first.
            spans.sort(key=lambda span: (span[2] - span[1] > 1, span[2]))
            passes.append(([slot for slot, _, _ in spans], self._forward(spans, tables)))
        if not passes:
            return {}
        fetched = fetch(torch.cat([tokens for _, tokens in passes]))

        @cache
        def read() -> dict[int, list[int]]:
            found: dict[int, list[int]] = {row.slot: [] for row in rows}
            for slot, token in zip(chain(*(slots for slots, _ in passes)), fetched(), strict=True):
                found[slot].append(token)
            return found

        return {x.slot: PendingDrafts(x.num_drafts, lambda slot=x.slot: read()[slot]) for x in rows}  # type: ignore[misc]

    def _forward(
        self, spans: Sequence[tuple[int, int, int]], tables: dict[int, IntArray], *, is_draft: bool = True
    ) -> Tensor:
        """Compute (slot, start, end), and the likeliest token behind each; a draft is written where passes read it."""
        size, stride = self._batch.capacity.block_size, self._batch.stride
        chunks, positions, read, num_tokens = list[Chunk](), list[IntArray](), list[IntArray](), 0
        for slot, start, end in spans:
            chunks.append(Chunk(num_tokens, end - start, start, tables[slot][: -(-end // size)]))
            positions.append(np.arange(start, end))
            read.append(positions[-1] + slot * stride)
            num_tokens += end - start
        last = np.cumsum([chunk.num_queries for chunk in chunks]) - 1
        behind = np.array([slot * stride + end for slot, _, end in spans], np.int64)
        inputs = np.concatenate(read), np.concatenate(positions), last
        self._staging.begin()
        arrays: Sequence[Indices] = inputs if self._staging.is_direct else [self._staging.put(x) for x in inputs]
        places = self._staging.put(behind)
        self._backend.start_step(pack_chunks(chunks, size))
        self._staging.send()
        found = self._loaded.logits(self._batch.flat_tokens, *arrays).max_ids.clone()
        if is_draft:
            self._batch.flat_tokens.index_copy_(0, places, found)
        return found


def check_vocabulary(served: LoadedModel, draft: LoadedModel) -> None:
    """Raise ModelRefused unless the same token ids mean the same in both models, and both can take drafts back."""
    if recurrent := [x.family for x in (served, draft) if x.recurrent]:
        raise ModelRefused(
            f"a draft model needs models without recurrent state, which no rejected draft can be taken back from;"
            f" {recurrent[0]} has one: leave --draft-model away"
        )
    advice = "give a draft model with the tokenizer of the served one"
    if draft.vocab_size != served.vocab_size:
        raise ModelRefused(
            f"the draft model has {draft.vocab_size} token ids and the served model {served.vocab_size}; {advice}"
        )
    ours, theirs = _tokens(served.directory), _tokens(draft.directory)
    if ours and theirs and ours != theirs:
        differing = sum(ours.get(token) != index for token, index in theirs.items())
        raise ModelRefused(f"the tokenizer of the draft model has other ids for {differing} tokens; {advice}")


def _tokens(directory: Path | None) -> dict[str, int]:
    """Return the ids of tokenizer.json by token; empty if there is none of a known form."""
    try:
        content: Any = {} if directory is None else json.loads((directory / "tokenizer.json").read_bytes())
        entries = content["model"]["vocab"]
        vocabulary = entries if isinstance(entries, dict) else {entry[0]: i for i, entry in enumerate(entries)}
        return vocabulary | {entry["content"]: entry["id"] for entry in content.get("added_tokens", ())}
    except (OSError, ValueError, TypeError, LookupError):
        return {}
