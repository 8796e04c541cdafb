"""The whole state of a core without any content, and a core made from it that decides alike.

Of tokens only their number is kept, of prefixes a part of their keyed digests, of request ids the number of arrival. A
core made from that needs no more: which tokens ended an answer, and what a new prefix's digest is, it is told.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from lineclear.scheduler.core.block_pool import BlockPool
from lineclear.scheduler.core.decode_batch import DecodeRows
from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.policies import PolicySettings
from lineclear.scheduler.core.running_batch import InflightRows, RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request, Sequence, State
from lineclear.scheduler.core.stats import CoreLimits, Counters
from lineclear.wire.messages import Hello, Sampling

State_ = dict[str, Any]
NORMAL, STOP, EOS = 0, 1, 2
"""The only tokens there are in a core without content."""
KEY_BYTES = 8

_PLAIN = (
    "queue_key", "arrival", "prompt_len", "max_len", "decode_joined_at", "decode_offset", "slot", "num_planned",
    "num_computed", "planned_step", "admission_count", "num_known", "num_published", "max_computed_before",
    "preemptions", "recoveries", "overtaken_count", "crash_count", "isolated_crashes", "isolated_kills",
    "clear_position", "pinned", "cached_tokens", "recomputed_tokens", "last_step", "started_at", "first_token_at",
    "last_token_at",
)  # fmt: skip
_plain = attrgetter(*_PLAIN)


def blank_request(
    number: int,
    prompt_len: int,
    output_len: int,
    max_tokens: int,
    priority: int,
    deadline: Any,
    tenant: str,
    model_fingerprint: str,
    vocabulary: list[Any] | None,
) -> Request:
    """A request of that shape, with nothing in it."""
    return Request(
        str(number),
        (NORMAL,) * prompt_len,
        Sampling(stop_ids=(STOP, EOS)),
        max_tokens,
        frozenset({EOS}),
        frozenset({STOP}),
        priority,
        deadline,
        tenant=tenant,
        output=(NORMAL,) * output_len,
        model_fingerprint=model_fingerprint,
        vocabulary=None if vocabulary is None else (vocabulary[0], tuple(vocabulary[1])),
    )


def request_shape(request: Request) -> tuple[Any, ...]:
    """What `blank` makes a like one of, after the number."""
    more = (request.priority, request.deadline, request.tenant, request.model_fingerprint, request.vocabulary)
    return len(request.prompt), len(request.output), request.max_tokens, *more


def limits_of(limits: CoreLimits) -> State_:
    """Limits without the secret."""
    return {name: value for name, value in asdict(limits).items() if name != "cache_secret"}


# --- from a core ----------------------------------------------------------------------------------------------------


def dump_core(core: Scheduler) -> State_:
    """A copy of the state. Costs about a microsecond a live request; `plain` makes it fit for a file."""
    residents, pool, decoding, world = core._batch, core._batch.pool, core._batch.decode_batch, core._state
    table: dict[Sequence, int] = {}
    for sequence in _all_sequences(core):
        table.setdefault(sequence, len(table))
    doubts = residents._pending
    return {
        "limits": limits_of(core.limits),
        "hello": None if core._hello is None else asdict(core._hello),
        "core": [core._step, core._planned_at, core._halvings, core._steps_to_doubling, core._num_arrivals],
        "counters": asdict(core._counters),
        "model": [
            list(world.step_time._weights),
            [list(r) for r in world.step_time._covariance],
            world.step_time.num_observations,
        ],
        "world": [world.draining, world.refusing, world.model_fingerprint],
        "strategy": {name: value for name, value in vars(world.strategy).items() if name != "_settings"},
        "order": world.queue_order.dump(),
        "sequences": [_dump_sequence(sequence) for sequence in table],
        "live": [table[s] for s in core._live.values()],
        "fresh": [table[s] for s in core._fresh.sequences()],
        "resuming": [table[s] for s in core._resuming.sequences()],
        "deadlines": [[at, number, table[s]] for at, number, s in core._deadlines if s.state is not State.FINISHED],
        "suspects": [table[s] for s in core._poison],
        "running": [table[s] for s in residents.running],
        "loose": [table[s] for s in residents.not_decoding],
        "decoding": [[table[s] for s in decoding], decoding.beat, decoding._step, list(decoding._confirmed)],
        "slots": [residents.num_slots, list(residents.free_slots)],
        "doubts": [[table[doubt.sequence], doubt.last_step] for doubt in doubts],
        "pool": {
            "sizes": [pool.num_blocks, pool.block_size],
            "references": list(pool._references),
            "empty": list(pool._empty),
            "cached": list(pool._cached),
            "published": [(block, key) for block, (key, _) in pool._published.items()],
            "dirty": sorted(pool._tainted),
            "doubts": [[b, doubts.index(d)] for b, d in pool._pending.items() if isinstance(d, InflightRows)],
            "to_zero": list(pool._to_zero),
        },
        "flights": [_dump_inflight(flight, table) for flight in core._inflight],
    }


def _all_sequences(core: Scheduler) -> Iterator[Sequence]:
    yield from core._live.values()
    for flight in core._inflight:
        yield from flight.sequences()
        yield from flight.samples
    for doubt in core._batch._pending:
        yield doubt.sequence


def _dump_sequence(s: Sequence) -> list[Any]:
    return [*request_shape(s.request), s.state.value, len(s.tokens), tuple(s.blocks), tuple(s.block_keys), _plain(s)]


def _dump_inflight(f: InflightStep, table: Mapping[Sequence, int]) -> State_:
    crew = f.decode_rows
    return {
        "crew": [[table[s] for s in crew.sequences], crew.slots, crew.origins, crew.firsts],
        "filling": [table[s] for s in f.completing_block],
        "owners": [[table[s], residence, end] for s, residence, end in f.owners],
        "samples": [table[s] for s in f.samples],
        "numbers": [f.step, f.decode_offset, f.num_tokens, f.kv_tokens],
    }


def to_json_types(value: Any) -> Any:
    """The same in JSON's types, with digests cut short."""
    if isinstance(value, bytes):
        return value[:KEY_BYTES].hex()
    if isinstance(value, dict):
        return {name: to_json_types(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(entry) for entry in value]
    return value


# --- and back -------------------------------------------------------------------------------------------------------


def load_core(state: State_) -> Scheduler:
    """A core in the state that a `plain` copy holds."""
    policy = PolicySettings(**state["limits"].pop("policy"))
    core = Scheduler(CoreLimits(**state["limits"], policy=policy))
    core._hello = None if state["hello"] is None else hello_from(state["hello"])
    core._step, core._planned_at, core._halvings, core._steps_to_doubling, core._num_arrivals = state["core"]
    core._counters = core._state.counters = Counters(**state["counters"])
    model = core._state.step_time
    model._weights, model._covariance, model.num_observations = state["model"]
    core._state.draining, core._state.refusing, core._state.model_fingerprint = state["world"]
    for name, value in state["strategy"].items():
        setattr(core._state.strategy, name, value)
    core._state.queue_order.load(state["order"])
    everybody = [_load_sequence(entry) for entry in state["sequences"]]
    core._live = {everybody[i].request.request_id: everybody[i] for i in state["live"]}
    for queue, name in ((core._fresh, "fresh"), (core._resuming, "resuming")):
        for i in state[name]:
            queue.push(everybody[i])
    core._deadlines = [(at, number, everybody[i]) for at, number, i in state["deadlines"]]
    heapq.heapify(core._deadlines)
    core._poison._suspects = {everybody[i]: None for i in state["suspects"]}
    _load_batch(core._batch, state, everybody)
    core._inflight = deque(_load_inflight(entry, everybody) for entry in state["flights"])
    return core


def hello_from(fields: State_) -> Hello:
    """A Hello from its fields."""
    return replace(Hello(**fields), eos_token_ids=tuple(fields["eos_token_ids"]))


def _load_sequence(entry: list[Any]) -> Sequence:
    *request, state, num_tokens, blocks, keys, values = entry
    fields = dict(zip(_PLAIN, values, strict=True))
    key, number = fields.pop("queue_key")
    sequence = Sequence(blank_request(number, *request), (key, number), 0.0)
    sequence.tokens = [NORMAL] * num_tokens
    sequence.state = State(state)
    sequence.blocks = list(blocks)
    sequence.block_keys = [bytes.fromhex(key) for key in keys]
    for name, value in fields.items():
        setattr(sequence, name, value)
    return sequence


def _load_batch(residents: RunningBatch, state: State_, everybody: list[Sequence]) -> None:
    num_blocks, block_size = state["pool"]["sizes"]
    num_slots, free_slots = state["slots"]
    residents.reset(num_slots, num_blocks, block_size)
    residents.free_slots = free_slots
    residents.running = {everybody[i]: None for i in state["running"]}
    residents.not_decoding = {everybody[i]: None for i in state["loose"]}
    residents._pending = [InflightRows(everybody[i], last_step) for i, last_step in state["doubts"]]
    _load_pool(residents.pool, state["pool"], residents._pending)
    members, beat, step, heard = state["decoding"]
    decoding = residents.decode_batch
    decoding.beat, decoding._step, decoding._confirmed = beat, step, tuple(heard)
    for i in members:
        decoding._add(everybody[i])


def _load_pool(pool: BlockPool, state: State_, doubts: list[InflightRows]) -> None:
    tokens = (NORMAL,) * pool.block_size
    pool._references = state["references"]
    pool._empty = deque(state["empty"])
    pool._cached = OrderedDict.fromkeys(state["cached"])
    pool._published = {block: (bytes.fromhex(key), tokens) for block, key in state["published"]}
    pool._by_key = {key: block for block, (key, _) in pool._published.items()}
    pool._tainted = set(state["dirty"])
    pool._pending = {block: doubts[i] for block, i in state["doubts"]}
    pool._to_zero = state["to_zero"]


def _load_inflight(state: State_, everybody: list[Sequence]) -> InflightStep:
    members, slots, origins, firsts = state["crew"]
    sequences = tuple(everybody[i] for i in members)
    ids, outputs = tuple(s.request.request_id for s in sequences), tuple(s.tokens for s in sequences)
    stops = tuple(s.stop_token_ids for s in sequences)
    step, beat, num_tokens, kv_tokens = state["numbers"]
    return InflightStep(
        step,
        beat,
        DecodeRows(sequences, ids, outputs, stops, tuple(slots), tuple(origins), tuple(firsts)),
        [everybody[i] for i in state["filling"]],
        [(everybody[i], residence, end) for i, residence, end in state["owners"]],
        [everybody[i] for i in state["samples"]],
        num_tokens,
        kv_tokens,
    )
