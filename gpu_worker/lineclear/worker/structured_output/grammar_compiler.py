"""Compiles grammars with llguidance (Moskal et al.) and computes the masks of its matchers.

Compiling takes from a millisecond to the scheduler's limit of about a second. It runs on threads of low priority, ahead
of the step that needs the grammar: `prepare`. llguidance releases the interpreter lock. The shortest grammar is next,
with aging: later ones overtake a grammar by its own size in total at most.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from lineclear.model_files.token_table import parser_limits, token_table
from lineclear.process.priority import LOWEST, lower_priority
from lineclear.worker.structured_output.grammar_constraints import Matcher
from lineclear.worker.structured_output.mask_threads import Bits

_MAX_CACHED = 128
_COMPILE_THREADS = 2


class GrammarCompiler:
    """A `Grammars` for the tokenizer of a model directory. Any thread may call `prepare`."""

    def __init__(
        self, directory: Path | None, vocab_size: int, eos_ids: Sequence[int], max_cached: int = _MAX_CACHED
    ) -> None:
        self._directory, self._vocab_size, self._eos_ids = directory, vocab_size, tuple(eos_ids)
        self.end_ids: Sequence[int] = self._eos_ids
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._waiting: list[tuple[int, int, str, Future[LLMatcher]]] = []  # a heap by key and number
        self._numbers = itertools.count()
        self._num_taken = 0  # characters of the grammars whose turn came
        self._threads: ThreadPoolExecutor | None = None
        self._table_lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def prepare(self, grammar: str, done: Callable[[], None]) -> None:
        """Compile a grammar ahead and call `done()` from another thread, also if it fails."""
        self._future(grammar).add_done_callback(lambda future: done())

    def matcher(self, grammar: str) -> Future[Matcher]:
        copy: Future[Matcher] = Future()

        def on_compiled(compiled: Future[LLMatcher]) -> None:
            try:
                copy.set_result(compiled.result().deep_copy())
            except Exception as error:
                copy.set_exception(error)

        self._future(grammar).add_done_callback(on_compiled)
        return copy

    def fill(self, matcher: Matcher, bits: Bits) -> None:
        """Write the allowed next tokens of a matcher. Other threads run at the same time."""
        assert isinstance(matcher, LLMatcher)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def token_bytes(self, token: int) -> bytes:
        return self._tokens().decode_bytes([token])

    def _future(self, grammar: str) -> Future[LLMatcher]:
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(
                        _COMPILE_THREADS, thread_name_prefix="grammar", initializer=lower_priority, initargs=(LOWEST,)
                    )
                future = self._compiled[grammar] = Future()
                key = self._num_taken + len(grammar)
                heapq.heappush(self._waiting, (key, next(self._numbers), grammar, future))
                self._threads.submit(self._compile_next)
                while len(self._compiled) > self._max_cached:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return future

    def _compile_next(self) -> None:
        with self._lock:
            _, _, grammar, future = heapq.heappop(self._waiting)
            self._num_taken += len(grammar)
        try:
            future.set_result(self._compile(grammar))
        except BaseException as error:
            future.set_exception(error)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # fills the caches that the copies share
        if matcher.is_error():
            raise ValueError("the grammar cannot be compiled")  # the library's text may have content
        return matcher

    def _tokens(self) -> LLTokenizer:
        with self._table_lock:
            if self._directory is None:
                raise ValueError("a model from memory has no tokenizer")
            if self._table is None:
                self._table = token_table(self._directory, self._vocab_size, self._eos_ids)
                self.end_ids = tuple(self._table.eos_tokens)
            return self._table
