"""One message of each kind of the plan protocol, with each field away from its default.

A field that the codec forgets then fails a test, and damage hits every field.
"""

from __future__ import annotations

from typing import Any, get_type_hints

from lineclear.wire import messages as wire
from lineclear.wire.sampling import LISTS, SCALARS

_BY_FORMAT = {"f": 0.7, "q": 40, "Q": 2**63}
_BY_TYPE: dict[Any, Any] = {
    tuple[int, ...]: (1, 2, 3),
    tuple[tuple[int, float], ...]: ((3, 1.5),),
    tuple[tuple[int, ...], ...]: ((7,), (), (8, 9)),
    str: "start: /a/",
}
_HINTS = get_type_hints(wire.Sampling)
SAMPLING = wire.Sampling(
    **{name: _BY_FORMAT[scalar.format] for name, scalar in SCALARS.items()},
    **{name: _BY_TYPE[_HINTS[name]] for name in LISTS},
)
EXAMPLES: tuple[wire.Message, ...] = (
    wire.StepPlan(
        epoch=2**63 - 1,
        step=812,
        chunks=(
            wire.Row(0, 17, 1, wire.RowOutput.SAMPLE, (), 4),
            wire.Row(5, 0, 300, wire.RowOutput.NONE, (11, 12, 13)),
            wire.Row(6, 3, 9, wire.RowOutput.SCORE),
            wire.Row(8, 0, 7, wire.RowOutput.POOL),
        ),
        inits=(
            wire.SlotInit(
                5, tuple(range(300)), 300, (9, 10), SAMPLING, 2, 3, wire.Pooling(wire.PoolingKind.MEAN, 64, False)
            ),
        ),
        zero_blocks=(4,),
        decodes=wire.Decodes((1, 7), (30, 44), ((7, 14),)),
        copy_blocks=(wire.BlockCopy(15, 11, 3), wire.BlockCopy(9, 12, 15), wire.BlockCopy(4, 4096, 16)),
        copy_states=(wire.StateCopy(64, 5), wire.StateCopy(7, 68)),
    ),
    wire.StepResult(
        *(3, 812, (5, 6), (wire.Logprobs(-0.5, ((5, -0.5), (9, -2.0))), None), frozenset({1, 4}), 0.021),
        counts=(0, 2),
        scores=(wire.Scores((-1.5, -2.0), (7, 8, 9, 1), (-0.5, -1.0, -0.25, -4.0)), wire.Scores((-3.0,))),
        vectors=(b"", b"\0\0\x80\x3f\0\0\0\0"),
        stuck_rows=frozenset({0}),
        deferred_rows=frozenset({3}),
        num_drafted=(0, 3),
        draft_seconds=0.004,
    ),
    wire.Hello(
        *(3, 4096, 16, 64, 2048, 32000, (2, 3), 256, "m", "llama", "float32", "cpu", "paged", 42, "2.13.0", "5.23.0"),
        *(2**63, "e00f4dad74647f96", "85c2f1e536bd6dd3", "m-draft", 64, 0.00025, 12.5, 16 << 30, 1 << 40, 7, 0),
        *(True, 5),
    ),
    wire.Heartbeat(3, 812, 1.5, (4, 5)),
    wire.StepError(3, 812, wire.StepErrorKind.OUT_OF_MEMORY, "OutOfMemoryError in attention"),
    wire.Rejoin(3),
    wire.Goodbye(3, "drained"),
    wire.Stopping(3),
    wire.LoadAdapter(3, 2, b"\1" * 32, "/adapters/french"),
    wire.UnloadAdapter(3, 2),
    wire.AdapterLoaded(3, 2, b"\1" * 32, "rank 64 is above the limit"),
    wire.PrepareGrammar(3, 4, "start: /a/"),
    wire.Profile(3, 20),
    wire.Profiled(3, 4, b"trace", "no step ran"),
    wire.SetLogLevel(3, wire.LogLevel.WARNING),
)
