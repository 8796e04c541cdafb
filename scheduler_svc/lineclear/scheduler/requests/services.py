"""What the requests of a server share, and what is known of the call of one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lineclear.errors import LineclearError
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.grammar_pool import GrammarPool
from lineclear.scheduler.requests.output_length import OutputLengths
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.request_stats import ServerStats
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validate.request import ModelBounds
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.parsed_answer import AnswerParsers


class Submitter(Protocol):
    """The engine methods that queue a request."""

    def submit(self, request: Request, *siblings: Request) -> None:
        """Queue a request and its siblings, all or none; the outcome is an event of each."""
        ...

    def prepare_grammar(self, grammar: str, done: Callable[[], None]) -> None:
        """Have the workers compile a grammar, then call `done()` from another thread."""
        ...


@dataclass(frozen=True, slots=True)
class RequestServices:
    """The services that all requests of a server use."""

    settings: SchedulerSettings
    """Those at the start: scheduling settings may have changed."""
    tokenizers: TokenizerPool
    grammars: GrammarPool
    parsers: AnswerParsers
    streams: OutputRouter
    engine: Submitter
    lengths: OutputLengths
    stats: ServerStats
    incident: Callable[[BaseException], LineclearError]
    clock: Callable[[], float]


class Call(NamedTuple):
    """The call or command with a request. `seconds` is its time from `arrival` on, None: the default."""

    bounds: ModelBounds
    caller: Identity
    tenant: str
    arrival: float
    seconds: float | None
