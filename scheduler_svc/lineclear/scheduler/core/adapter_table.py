"""The adapters (LoRA) that the workers hold: each has an index, which slots of its requests name.

An adapter is known by its key, a digest of its content. An index is free again when the adapter is unloaded and the
last request that uses it has ended: later plans never name it for the old adapter. A message that gives it to another
one runs behind the plans that are in flight.
"""

from __future__ import annotations

from lineclear.errors import AdapterLimitReached, AdapterNotFound


class AdapterTable:
    """At most `max_adapters` adapters, with indices from 1: 0 is the model without one."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._indices: dict[bytes, int] = {}
        self._num_uses: dict[bytes, int] = {}  # live requests
        self._unloading: set[bytes] = set()  # they have live requests, and take no new ones

    @property
    def indices(self) -> dict[bytes, int]:
        """Return the index of each adapter that the workers must hold."""
        return dict(self._indices)

    def index(self, key: bytes) -> int:
        """Return the index of an adapter that a live request uses."""
        return self._indices[key]

    def load(self, key: bytes) -> int:
        """Return the index of an adapter, which is a new one unless the workers hold it. Raises AdapterLimitReached."""
        if key not in self._indices:
            taken = set(self._indices.values())
            unused = next((index for index in range(1, self._max_adapters + 1) if index not in taken), None)
            if unused is None:
                raise AdapterLimitReached(
                    f"{len(taken)} adapters are loaded and in use, and the limit is {self._max_adapters}; unload one,"
                    " or raise --max-loras",
                    metadata={"loaded": str(len(taken)), "limit": str(self._max_adapters)},
                )
            self._indices[key], self._num_uses[key] = unused, 0
        self._unloading.discard(key)
        return self._indices[key]

    def unload(self, key: bytes) -> int:
        """Refuse new requests for an adapter; return how many use it. The last one frees its index."""
        num_uses = self._num_uses.get(key, 0)
        if num_uses:
            self._unloading.add(key)
        else:
            self._forget(key)
        return num_uses

    def check(self, key: bytes) -> None:
        """Raises AdapterNotFound unless requests may use the adapter."""
        if key not in self._indices or key in self._unloading:
            raise AdapterNotFound("the adapter was unloaded before the request reached the queue")

    def acquire(self, key: bytes) -> None:
        """Count a request that uses an adapter."""
        self._num_uses[key] += 1

    def release(self, key: bytes) -> None:
        """Count the end of a request."""
        self._num_uses[key] -= 1
        if not self._num_uses[key] and key in self._unloading:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._indices.pop(key, None)
        self._num_uses.pop(key, None)
        self._unloading.discard(key)
