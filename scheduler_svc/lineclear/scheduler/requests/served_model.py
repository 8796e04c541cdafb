"""The model that requests are validated against: the bounds of the joined worker, or of the worker before."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from lineclear.errors import LineclearError, ServerStarting
from lineclear.scheduler.requests.engine_api import EngineApi
from lineclear.scheduler.requests.validate.request import ModelBounds
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.wire.messages import Hello

log = structlog.get_logger()

DEMO_NAME = "lineclear-demo"


class ServedModel:
    """Bounds from the worker's Hello, and the reason for which new requests are rejected."""

    def __init__(
        self, settings: SchedulerSettings, engine: EngineApi, defaults: Mapping[str, float], num_tokenizer_ids: int
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._defaults = defaults
        self._num_tokenizer_ids = num_tokenizer_ids
        self._bounds: tuple[Hello, ModelBounds] | None = None  # computed once for each worker
        self._rejection: Callable[[], LineclearError] | None = None

    def bounds(self) -> ModelBounds | None:
        """Return the bounds of the joined or the last worker; None before the first."""
        hello = self._engine.worker_status.last_hello
        if hello is None:
            return None
        if self._bounds is None or self._bounds[0] is not hello:
            self._bounds = hello, self._bounds_of(hello)
        return self._bounds[1]

    def require(self) -> ModelBounds:
        """Return the bounds for a new request. Raises the reason for rejecting it."""
        if (rejection := self.rejection()) is not None:
            raise rejection
        bounds = self.bounds()
        if bounds is None:
            raise _no_worker_yet()
        return bounds

    def require_hello(self) -> Hello:
        """Return the Hello of the joined or the last worker. Raises the reason for its absence."""
        hello = self._engine.worker_status.last_hello
        if hello is None:
            raise self.rejection() or _no_worker_yet()
        return hello

    def reject(self, error: Callable[[], LineclearError]) -> None:
        self._rejection = error

    def rejection(self) -> LineclearError | None:
        """Return the error for new requests while they are rejected."""
        return None if self._rejection is None else self._rejection()

    def _bounds_of(self, hello: Hello) -> ModelBounds:
        if self._num_tokenizer_ids > hello.vocab_size:
            log.warning("tokenizer_larger_than_model", tokens=self._num_tokenizer_ids, vocabulary=hello.vocab_size)
        return ModelBounds(
            context_length=hello.max_model_len,
            vocab_size=hello.vocab_size,
            settings=self._settings,
            step_tokens=hello.step_tokens(self._settings.target_batch_tokens),
            eos_ids=frozenset(hello.eos_token_ids),
            defaults=self._defaults,
            model=served_model_name(self._settings, hello),
            model_fingerprint=hello.model_fingerprint,
            vocabulary=(hello.vocab_size, hello.eos_token_ids),
        )


def served_model_name(settings: SchedulerSettings, hello: Hello) -> str:
    """Return the model name that requests may use."""
    return settings.served_model_name or (DEMO_NAME if settings.demo else hello.model_id)


def _no_worker_yet() -> ServerStarting:
    return ServerStarting("no worker has joined yet; the model may still be loading", retry_after_seconds=1.0)
