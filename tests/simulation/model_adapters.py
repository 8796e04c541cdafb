"""Model of the loaded adapters: which requests may use, and which indices live requests hold."""

from __future__ import annotations

from collections.abc import Iterable

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence


class ModelAdapters:
    """The loaded adapters of a core with at most `max_adapters`."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._loaded: set[bytes] = set()
        self._index: dict[bytes, int] = {}  # the last one of each key

    def on_load(self, key: bytes, index: int | None, live: Iterable[ModelSequence]) -> None:
        """Check the index of a loaded adapter; None: it was refused."""
        held = self._loaded | {sequence.request.adapter for sequence in live} - {b""}
        if index is None:
            require(key not in held and len(held) >= self._max_adapters, "I25", "an adapter is refused if all are held")
            return
        require(key in held or len(held) < self._max_adapters, "I25", "no more adapters than the limit")
        require(1 <= index <= self._max_adapters, "I25", "an index in range")
        others = {self._index[other] for other in held if other != key}
        require(index not in others, "I25", "an index in use is not given to another adapter")
        require(key not in held or index == self._index[key], "I25", "a held adapter keeps its index")
        self._loaded.add(key)
        self._index[key] = index

    def on_unload(self, key: bytes, num_uses: int, live: Iterable[ModelSequence]) -> None:
        """Check how many requests use an unloaded adapter."""
        right = sum(sequence.request.adapter == key for sequence in live)
        require(num_uses == right, "I25", "the requests of an unloaded adapter are counted")
        self._loaded.discard(key)

    def is_loaded(self, key: bytes) -> bool:
        """Return whether a new request may use the adapter; `key` empty: none."""
        return not key or key in self._loaded

    def index(self, key: bytes) -> int:
        """Return the index that slots of the adapter's requests must name."""
        return self._index[key] if key else 0
