"""What the requests of a server share, composed here, and what is known of the call of one of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from lineclear.errors import InternalError
from lineclear.process.exception_location import exception_fields
from lineclear.scheduler.engine.engine_stats import WorkerStatus
from lineclear.scheduler.requests.adapters import Adapters
from lineclear.scheduler.requests.engine_api import EngineApi
from lineclear.scheduler.requests.expected_length import OutputLengths, load_estimator
from lineclear.scheduler.requests.grammar_pool import GrammarPool
from lineclear.scheduler.requests.loop_pacer import LoopPacer
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.request_metrics import ServerStats
from lineclear.scheduler.requests.served_model import ServedModel
from lineclear.scheduler.requests.tenant_limits import QueueLimiter
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validate.request import ModelBounds
from lineclear.scheduler.requests.validate.sampling import model_defaults
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.parsed_answer import choose_parsers
from lineclear.scheduler.text.template_renderer import ChatTemplate
from lineclear.scheduler.text.tokenizer import Tokenizer

log = structlog.get_logger()


class RequestServices:
    """The services that all requests of a server use. On the event loop that runs when it is created."""

    def __init__(
        self,
        settings: SchedulerSettings,
        engine: EngineApi,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None = None,
        generation_config: Mapping[str, Any] | None = None,
        model: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        """Those in force."""
        self.directory = model or Path()
        """Of the model."""
        self.engine = engine
        self.clock = clock
        self.on_worker: Callable[[WorkerStatus], None] = lambda status: None
        """Called when a worker joins or is lost."""
        self.pacer = LoopPacer(clock)
        """Spaces large pieces of work on the event loop."""
        self.stats = ServerStats(clock())
        self.lengths = OutputLengths(load_estimator(settings.output_length_estimator))
        self.tokenizers = TokenizerPool(tokenizer, chat, settings, self.pacer)
        self.grammars = GrammarPool(model if tokenizer.has_byte_tokens else None, settings)
        source = None if chat is None else chat.source
        self.parsers = choose_parsers(settings.tool_call_parser, settings.reasoning_parser, source)
        """Parsers of the answers to conversations."""
        if chat is not None:
            names = {"tool_calls": self.parsers.tool_calls, "reasoning": self.parsers.reasoning}
            log.info("answer_parsers", **{kind: name or "none" for kind, name in names.items()})
        defaults = model_defaults(generation_config or {}) if settings.use_generation_config else {}
        self.model = ServedModel(settings, engine, defaults, tokenizer.vocab_size)
        self.quota = QueueLimiter(settings, clock)
        self.quota.predicted_wait = lambda: engine.snapshot().core.predicted_wait_seconds
        self.streams = OutputRouter(
            engine, settings.max_unread_tokens, self._on_worker_change, self.incident, self.stats.output, clock
        )
        self.adapters = Adapters(settings, engine, clock, model)

    def follow(self, settings: SchedulerSettings) -> None:
        self.settings = self.quota.settings = settings

    def incident(self, error: BaseException) -> InternalError:
        """Log a bug in the work on a request, and return the error that the client gets for it."""
        return incident("/lineclear.v1.InferenceService: a request", error)

    def close(self) -> None:
        """Stop threads and processes. No call may be in progress."""
        self.streams.is_closed = True
        self.tokenizers.close()
        self.grammars.close()

    def _on_worker_change(self, joined: bool) -> None:
        if joined:
            self.model.bounds()
        self.on_worker(self.engine.worker_status)


class Call(NamedTuple):
    """The call or command with a request. `seconds` is its time from `arrival` on, None: the default."""

    bounds: ModelBounds
    caller: Identity
    tenant: str
    arrival: float
    seconds: float | None


def incident(where: str, error: BaseException) -> InternalError:
    """Log a bug and return the error for the client, with the same incident number."""
    incident_id = secrets.token_hex(8)
    log.error("internal_error", incident_id=incident_id, where=where, **exception_fields(error))
    message = f"internal error; the server's log has it as incident {incident_id}"
    return InternalError(message, metadata={"incident_id": incident_id})
