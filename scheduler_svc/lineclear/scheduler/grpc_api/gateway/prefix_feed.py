"""The changes of the prefix cache, for gateways that send a request to the replica that has its prompt.

Two looks at the cache are compared, so a server without such a gateway does nothing for it. Each caller sees the blocks
of its own cache salt only, because they show the tokens of prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from smg_grpc_proto.generated import common_pb2 as common

from lineclear.scheduler.core.prefix_keys import TOKEN_BYTES, Prefix


class PrefixFeed:
    def __init__(self, sequence_number: int) -> None:
        """`sequence_number` is the last one that the subscriber has."""
        self._number, self._num_events = sequence_number, 0
        self._known: dict[bytes, Prefix] | None = None

    def next_batch(self, root: bytes, prefixes: Iterable[Prefix]) -> common.KvEventBatch | None:
        """Return what has changed in the chains behind `root` since the last call; None if nothing has.

        The first batch says that what the subscriber knows is void.
        """
        now = {prefix.key: prefix for prefix in _chains(root, prefixes)}
        known, is_first = self._known or {}, self._known is None
        self._known = now
        events = [common.KvCacheEvent(cleared=common.KvCacheCleared())] if is_first else []
        if gone := [_number_of(key) for key in known.keys() - now.keys()]:
            events.append(common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=gone)))
        events += [_stored(prefix, root) for key, prefix in now.items() if key not in known]
        if not events:
            return None
        for event in events:
            self._num_events += 1
            event.event_id = self._num_events
        self._number += 1
        return common.KvEventBatch(
            sequence_number=self._number, timestamp=datetime.now(UTC).timestamp(), events=events, dp_rank=0
        )


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
    tokens = [
        int.from_bytes(prefix.tokens[start : start + TOKEN_BYTES], "big")
        for start in range(0, len(prefix.tokens), TOKEN_BYTES)
    ]
    block = common.KvBlock(block_hash=_number_of(prefix.key), token_ids=tokens, block_size=len(tokens))
    parent = None if prefix.parent == root else _number_of(prefix.parent)
    return common.KvCacheEvent(stored=common.KvBlocksStored(blocks=[block], parent_block_hash=parent))


def _number_of(key: bytes) -> int:
    """Return the 64 bits of a key by which subscribers name a block."""
    return int.from_bytes(key[:8], "big", signed=True)
