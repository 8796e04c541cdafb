"""The changes of the prefix cache, for gateways that send a request to the replica that has its prompt.

Two looks at the cache are compared, so a server without such a gateway does nothing for it. Each caller sees the blocks
of its own cache salt only, because they show the tokens of prompts.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from lineclear.scheduler.core.prefix_keys import TOKEN_BYTES, Prefix

_MAX_EVENTS = 2048  # of a batch: some 200 KB with 16 tokens a block; gRPC's clients take 4 MiB


class PrefixFeed:
    def __init__(self, sequence_number: int) -> None:
        """`sequence_number` is the last one that the subscriber has."""
        self._number, self._num_events = sequence_number, 0
        self._known: dict[bytes, Prefix] | None = None

    def next_batches(self, root: bytes, prefixes: Iterable[Prefix]) -> list[common.KvEventBatch]:
        """Return what has changed in the chains behind `root` since the last call, in messages that gRPC takes.

        The first batch says that what the subscriber knows is void.
        """
        now = {prefix.key: prefix for prefix in _chains(root, prefixes)}
        known, is_first = self._known or {}, self._known is None
        self._known = now
        events = [common.KvCacheEvent(cleared=common.KvCacheCleared())] if is_first else []
        for gone in _parts([_number_of(key) for key in known.keys() - now.keys()]):
            events.append(common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=gone)))
        events += [_stored(prefix, root) for key, prefix in now.items() if key not in known]
        return [self._batch(part) for part in _parts(events)]

    def _batch(self, events: list[common.KvCacheEvent]) -> common.KvEventBatch:
        for event in events:
            self._num_events += 1
            event.event_id = self._num_events
        self._number += 1
        return common.KvEventBatch(
            sequence_number=self._number, timestamp=datetime.now(UTC).timestamp(), events=events, dp_rank=0
        )


def _parts(whole: list[Any]) -> Iterator[list[Any]]:
    return (whole[start : start + _MAX_EVENTS] for start in range(0, len(whole), _MAX_EVENTS))


def _chains(root: bytes, prefixes: Iterable[Prefix]) -> Iterator[Prefix]:
    """Yield the blocks that follow `root`, parents before their children."""
    children: dict[bytes, list[Prefix]] = defaultdict(list)
    for prefix in prefixes:
        children[prefix.parent].append(prefix)
    ends: Sequence[bytes] = [root]
    while ends:
        found = [prefix for end in ends for prefix in children.get(end, ())]
        yield from found
        ends = list({prefix.key: None for prefix in found})


def _stored(prefix: Prefix, root: bytes) -> common.KvCacheEvent:
    tokens = struct.unpack(f">{len(prefix.tokens) // TOKEN_BYTES}i", prefix.tokens)
    block = common.KvBlock(block_hash=_number_of(prefix.key), token_ids=tokens, block_size=len(tokens))
    parent = None if prefix.parent == root else _number_of(prefix.parent)
    return common.KvCacheEvent(stored=common.KvBlocksStored(blocks=[block], parent_block_hash=parent))


def _number_of(key: bytes) -> int:
    """Return the 64 bits of a key by which subscribers name a block."""
    return int.from_bytes(key[:8], "big", signed=True)
