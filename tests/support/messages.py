"""Hypothesis strategies for each message of the plan protocol, with values that the wire represents exactly."""

from __future__ import annotations

import struct
from typing import Any, get_type_hints

from hypothesis import strategies as st

from lineclear.wire.messages import (
    AdapterLoaded,
    BlockCopy,
    Decodes,
    Goodbye,
    Heartbeat,
    Hello,
    LoadAdapter,
    LogLevel,
    Logprobs,
    Message,
    Pooling,
    PoolingKind,
    PrepareGrammar,
    Rejoin,
    Row,
    RowOutput,
    Sampling,
    Scores,
    SetLogLevel,
    SlotInit,
    StepError,
    StepErrorKind,
    StepPlan,
    StepResult,
    Stopping,
    UnloadAdapter,
)
from lineclear.wire.sampling import LISTS, SCALARS

INT32 = 2**31 - 1
naturals = st.integers(0, INT32)
positives = st.integers(1, INT32)
uint64 = st.integers(0, 2**64 - 1)
# Parameters and logprobs have single precision on the wire.
floats = st.floats(width=32, allow_nan=False)
seconds = st.floats(0, 1e9)


def tuples(elements: st.SearchStrategy, max_size: int = 8) -> st.SearchStrategy:
    return st.lists(elements, max_size=max_size).map(tuple)


BY_FORMAT = {"f": floats, "q": st.integers(-(2**63), 2**63 - 1), "Q": uint64}
BY_TYPE_OF_LIST: dict[Any, st.SearchStrategy[Any]] = {
    tuple[int, ...]: tuples(naturals),
    tuple[tuple[int, float], ...]: tuples(st.tuples(naturals, floats)),
    tuple[tuple[int, ...], ...]: tuples(tuples(naturals)),
    str: st.text(),
}
HINTS = get_type_hints(Sampling)
samplings = st.builds(
    Sampling,
    **{name: BY_FORMAT[scalar.format] for name, scalar in SCALARS.items()},
    **{name: BY_TYPE_OF_LIST[HINTS[name]] for name in LISTS},
)


@st.composite
def slot_inits(draw: st.DrawFn) -> SlotInit:
    tokens = tuple(draw(st.lists(naturals, min_size=1, max_size=40)))
    pooling = st.none() | st.builds(Pooling, st.sampled_from(PoolingKind), naturals, st.booleans())
    prompt_len, blocks = draw(st.integers(1, len(tokens))), draw(tuples(naturals))
    counts = draw(naturals), draw(naturals)
    return SlotInit(draw(naturals), tokens, prompt_len, blocks, draw(samplings), *counts, draw(pooling))


@st.composite
def decodes(draw: st.DrawFn) -> Decodes:
    slots = tuple(draw(st.lists(naturals, max_size=8, unique=True)))
    starts = tuple(draw(naturals) for _ in slots)
    grown = [slot for slot in slots if draw(st.booleans())]
    return Decodes(slots, starts, tuple((slot, draw(naturals)) for slot in grown))


rows = st.builds(Row, naturals, naturals, positives, st.sampled_from(RowOutput), tuples(naturals), naturals)
copies = st.builds(BlockCopy, naturals, naturals, positives)
plans = st.builds(
    StepPlan, uint64, uint64, tuples(rows), tuples(slot_inits(), 3), tuples(naturals), decodes(), tuples(copies)
)
logprobs = st.none() | st.builds(Logprobs, floats, tuples(st.tuples(naturals, floats), 4))


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    count, num_top = draw(st.integers(1, 5)), draw(st.integers(0, 3))

    def column(values: st.SearchStrategy[Any], size: int) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    return Scores(column(floats, count), column(naturals, count * num_top), column(floats, count * num_top))


vectors = st.lists(floats, max_size=4).map(lambda values: struct.pack(f"<{len(values)}f", *values))


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    counts = draw(st.just(()) | tuples(st.integers(0, 3)))
    tokens = draw(tuples(naturals))
    if counts:
        tokens = tuple(range(sum(counts)))
    size = len(tokens)
    listed = draw(st.sampled_from([0, size]))
    scored, pooled = draw(tuples(scores(), 3)), draw(tuples(vectors, 3))
    num_outputs = len(counts or tokens) + len(scored) + len(pooled)
    return StepResult(
        epoch=draw(uint64),
        step=draw(uint64),
        tokens=tokens,
        logprobs=tuple(draw(st.lists(logprobs, min_size=listed, max_size=listed))),
        bad_rows=draw(st.frozensets(st.integers(0, num_outputs - 1))) if num_outputs else frozenset(),
        step_seconds=draw(seconds),
        counts=counts,
        scores=scored,
        vectors=pooled,
        stuck_rows=draw(st.frozensets(st.integers(0, num_outputs - 1))) if num_outputs else frozenset(),
        deferred_rows=draw(st.frozensets(st.integers(0, num_outputs - 1))) if num_outputs else frozenset(),
        num_drafted=draw(st.just(()) | tuples(naturals)),
        draft_seconds=draw(seconds),
    )


hellos = st.builds(
    Hello,
    epoch=uint64,
    num_blocks=positives,
    block_size=positives,
    num_slots=positives,
    max_model_len=positives,
    vocab_size=positives,
    eos_token_ids=tuples(naturals),
    max_step_tokens=positives,
    model_id=st.text(),
    family=st.text(),
    dtype=st.text(),
    device=st.text(),
    attention_backend=st.text(),
    pid=naturals,
    torch_version=st.text(),
    transformers_version=st.text(),
    draft_model=st.text(),
    instance=uint64,
)
heartbeats = st.builds(Heartbeat, uint64, uint64, seconds, tuples(naturals))
errors = st.builds(StepError, uint64, uint64, st.sampled_from(StepErrorKind), st.text())
rejoins = st.builds(Rejoin, uint64)
goodbyes = st.builds(Goodbye, uint64, st.text())
log_levels = st.builds(SetLogLevel, uint64, st.sampled_from(LogLevel))

BY_TYPE: dict[type, st.SearchStrategy[Message]] = {
    StepPlan: plans,
    StepResult: results(),
    Hello: hellos,
    Heartbeat: heartbeats,
    StepError: errors,
    Rejoin: rejoins,
    Goodbye: goodbyes,
    SetLogLevel: log_levels,
    Stopping: st.builds(Stopping, uint64),
    LoadAdapter: st.builds(LoadAdapter, uint64, positives, st.binary(max_size=40), st.text(max_size=20)),
    UnloadAdapter: st.builds(UnloadAdapter, uint64, positives),
    AdapterLoaded: st.builds(AdapterLoaded, uint64, positives, st.binary(max_size=40), st.text(max_size=20)),
    PrepareGrammar: st.builds(PrepareGrammar, uint64, naturals, st.text()),
}
