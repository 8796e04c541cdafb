"""Hypothesis strategies for each message of the plan protocol, with values that the wire represents exactly."""

from __future__ import annotations

import enum
import struct
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from lineclear.wire import messages
from lineclear.wire.messages import (
    BlockCopy,
    Decodes,
    Logprobs,
    Pooling,
    Row,
    Sampling,
    Scores,
    SlotInit,
    StateCopy,
    StepPlan,
    StepResult,
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
POSITIVE = frozenset(
    {
        *("num_blocks", "block_size", "num_slots", "max_model_len", "vocab_size", "max_step_tokens"),
        *("num_tokens", "num_positions", "index"),
    }
)
"""Fields that the decoder refuses at 0."""


def field(name: str, kind: Any) -> st.SearchStrategy[Any]:
    """Return the values of a field of a message, by its name and type."""
    if kind is int:
        return positives if name in POSITIVE else uint64 if name in ("epoch", "step", "instance") else naturals
    if kind is float:
        return seconds if name.endswith("seconds") else floats
    if isinstance(kind, enum.EnumType):
        return st.sampled_from(kind)
    return {bool: st.booleans(), str: st.text(max_size=20), bytes: st.binary(max_size=40)}.get(
        kind, BY_TYPE_OF_LIST.get(kind, st.nothing())
    )


def built(kind: Any) -> st.SearchStrategy[Any]:
    """Return instances of a message or a part of one, with any value in each field."""
    return st.builds(kind, **{name: field(name, hint) for name, hint in get_type_hints(kind).items()})


HINTS = get_type_hints(Sampling)
samplings = st.builds(
    Sampling,
    **{name: BY_FORMAT[scalar.format] for name, scalar in SCALARS.items()},
    **{name: BY_TYPE_OF_LIST[HINTS[name]] for name in LISTS},
)


@st.composite
def slot_inits(draw: st.DrawFn) -> SlotInit:
    tokens = tuple(draw(st.lists(naturals, min_size=1, max_size=40)))
    pooling = st.none() | built(Pooling)
    prompt_len, blocks = draw(st.integers(1, len(tokens))), draw(tuples(naturals))
    counts = draw(naturals), draw(naturals)
    return SlotInit(draw(naturals), tokens, prompt_len, blocks, draw(samplings), *counts, draw(pooling))


@st.composite
def decodes(draw: st.DrawFn) -> Decodes:
    slots = tuple(draw(st.lists(naturals, max_size=8, unique=True)))
    starts = tuple(draw(naturals) for _ in slots)
    grown = [slot for slot in slots if draw(st.booleans())]
    return Decodes(slots, starts, tuple((slot, draw(naturals)) for slot in grown))


copies = tuples(built(BlockCopy)), tuples(built(StateCopy))
plans = st.builds(
    StepPlan, uint64, uint64, tuples(built(Row)), tuples(slot_inits(), 3), tuples(naturals), decodes(), *copies
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


CONSTRAINED: dict[type, st.SearchStrategy[Any]] = {StepPlan: plans, StepResult: results()}
"""Messages whose fields must agree with each other."""
BY_TYPE: dict[type, st.SearchStrategy[Any]] = {
    kind: CONSTRAINED[kind] if kind in CONSTRAINED else built(kind) for kind in get_args(messages.Message)
}
