"""The engine, as requests see it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from lineclear.errors import LineclearError
from lineclear.scheduler.core.prefix_keys import Prefix
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WorkerStatus


class EngineApi(Protocol):
    """Methods of the engine. Thread-safe; they do not wait."""

    @property
    def worker_status(self) -> WorkerStatus:
        """Which worker is joined."""

    def submit(self, request: Request, *siblings: Request) -> None:
        """Queue a request and its siblings, all or none; the outcome is an event of each."""

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        """End a request with `error`."""

    def finish(self, request_id: str, num_tokens: int) -> None:
        """Complete a request after its first `num_tokens` output tokens."""

    def prepare_grammar(self, grammar: str, done: Callable[[], None]) -> None:
        """Have the workers compile a grammar, then call `done()` from another thread."""

    def load_adapter(self, key: bytes, path: str) -> Future[None]:
        """Load an adapter on every joined worker. The future raises AdapterRefused or AdapterLimitReached."""

    def unload_adapter(self, key: bytes) -> Future[int]:
        """Take no further requests for an adapter. The future has the number of those that use it."""

    def prefixes(self, cache_salt: bytes) -> Future[tuple[bytes, list[Prefix]]]:
        """Return the start of a salt's chains, and the cached blocks of prompts of all workers and salts."""
        ...

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache of each worker."""
        ...

    def drain(self) -> None:
        """Reject new requests."""

    def snapshot(self) -> EngineSnapshot:
        """Return counters and gauges of a moment ago."""

    def fresh_snapshot(self) -> Future[EngineSnapshot]:
        """Return counters and gauges of this moment."""
