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

from lineclear.scheduler.scheduling.blocks import BlockPool
from lineclear.scheduler.scheduling.core import Scheduler
from lineclear.scheduler.scheduling.decoding import Crew
from lineclear.scheduler.scheduling.flights import Flight
from lineclear.scheduler.scheduling.ledger import CoreLimits, Counters
from lineclear.scheduler.scheduling.policy import PolicySettings
from lineclear.scheduler.scheduling.residents import Residents, RowsInFlight
from lineclear.scheduler.scheduling.sequence import Request, Sequence, State
from lineclear.wire.types import Hello, Sampling

State_ = dict[str, Any]
NORMAL, STOP, EOS = 0, 1, 2
"""The only tokens there are in a core without content."""
KEY_BYTES = 8

_PLAIN = (
    "rank", "arrival", "prompt_len", "limit", "joined", "origin", "slot", "planned", "computed", "planned_step",
    "residence", "known", "saved", "high_water", "preemptions", "recoveries", "bypasses", "strikes", "lone_crashes",
    "lone_kills", "mark", "pinned", "cached_tokens", "recomputed_tokens", "last_step", "started_at", "first_token_at",
    "last_token_at",
)  # fmt: skip
_plain = attrgetter(*_PLAIN)


def blank(
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


def shape(request: Request) -> tuple[Any, ...]:
    """What `blank` makes a like one of, after the number."""
    more = (request.priority, request.deadline, request.tenant, request.model_fingerprint, request.vocabulary)
    return len(request.prompt), len(request.output), request.max_tokens, *more


def limits_of(limits: CoreLimits) -> State_:
    """Limits without the secret."""
    return {name: value for name, value in asdict(limits).items() if name != "cache_secret"}


# --- from a core ----------------------------------------------------------------------------------------------------


def freeze(core: Scheduler) -> State_:
    """A copy of the state. Costs about a microsecond a live request; `plain` makes it fit for a file."""
    residents, pool, decoding, world = core._residents, core._residents.pool, core._residents.decoding, core._world
    table: dict[Sequence, int] = {}
    for sequence in _everybody(core):
        table.setdefault(sequence, len(table))
    doubts = residents._doubts
    return {
        "limits": limits_of(core.limits),
        "hello": None if core._hello is None else asdict(core._hello),
        "core": [core._step, core._planned_at, core._halvings, core._steps_to_doubling, core._num_arrivals],
        "counters": asdict(core._counters),
        "model": [list(world.model._weights), [list(r) for r in world.model._covariance], world.model.num_observations],
        "world": [world.draining, world.refusing, world.model_fingerprint],
        "strategy": {name: value for name, value in vars(world.strategy).items() if name != "_settings"},
        "order": world.order.state(),
        "sequences": [_freeze_sequence(sequence) for sequence in table],
        "live": [table[s] for s in core._live.values()],
        "fresh": [table[s] for s in core._fresh.sequences()],
        "resuming": [table[s] for s in core._resuming.sequences()],
        "deadlines": [[at, number, table[s]] for at, number, s in core._deadlines if s.state is not State.FINISHED],
        "suspects": [table[s] for s in core._suspects],
        "running": [table[s] for s in residents.running],
        "loose": [table[s] for s in residents.loose],
        "decoding": [[table[s] for s in decoding], decoding.beat, decoding._step, list(decoding._heard)],
        "slots": [residents.num_slots, list(residents.free_slots)],
        "doubts": [[table[doubt.sequence], doubt.last_step] for doubt in doubts],
        "pool": {
            "sizes": [pool.num_blocks, pool.block_size],
            "references": list(pool._references),
            "empty": list(pool._empty),
            "cached": list(pool._cached),
            "published": [(block, key) for block, (key, _) in pool._published.items()],
            "dirty": sorted(pool._dirty),
            "doubts": [[b, doubts.index(d)] for b, d in pool._doubts.items() if isinstance(d, RowsInFlight)],
            "to_zero": list(pool._to_zero),
        },
        "flights": [_freeze_flight(flight, table) for flight in core._flights],
    }


def _everybody(core: Scheduler) -> Iterator[Sequence]:
    yield from core._live.values()
    for flight in core._flights:
        yield from flight.sequences()
        yield from flight.samples
    for doubt in core._residents._doubts:
        yield doubt.sequence


def _freeze_sequence(s: Sequence) -> list[Any]:
    return [*shape(s.request), s.state.value, len(s.tokens), tuple(s.blocks), tuple(s.keys), _plain(s)]


def _freeze_flight(f: Flight, table: Mapping[Sequence, int]) -> State_:
    crew = f.crew
    return {
        "crew": [[table[s] for s in crew.sequences], crew.slots, crew.origins, crew.firsts],
        "filling": [table[s] for s in f.filling],
        "owners": [[table[s], residence, end] for s, residence, end in f.owners],
        "samples": [table[s] for s in f.samples],
        "numbers": [f.step, f.beat, f.num_tokens, f.kv_tokens],
    }


def plain(value: Any) -> Any:
    """The same in JSON's types, with digests cut short."""
    if isinstance(value, bytes):
        return value[:KEY_BYTES].hex()
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


# --- and back -------------------------------------------------------------------------------------------------------


def thaw(state: State_) -> Scheduler:
    """A core in the state that a `plain` copy holds."""
    policy = PolicySettings(**state["limits"].pop("policy"))
    core = Scheduler(CoreLimits(**state["limits"], policy=policy))
    core._hello = None if state["hello"] is None else hello_of(state["hello"])
    core._step, core._planned_at, core._halvings, core._steps_to_doubling, core._num_arrivals = state["core"]
    core._counters = core._world.counters = Counters(**state["counters"])
    model = core._world.model
    model._weights, model._covariance, model.num_observations = state["model"]
    core._world.draining, core._world.refusing, core._world.model_fingerprint = state["world"]
    for name, value in state["strategy"].items():
        setattr(core._world.strategy, name, value)
    core._world.order.restore(state["order"])
    everybody = [_thaw_sequence(entry) for entry in state["sequences"]]
    core._live = {everybody[i].request.request_id: everybody[i] for i in state["live"]}
    for queue, name in ((core._fresh, "fresh"), (core._resuming, "resuming")):
        for i in state[name]:
            queue.push(everybody[i])
    core._deadlines = [(at, number, everybody[i]) for at, number, i in state["deadlines"]]
    heapq.heapify(core._deadlines)
    core._suspects._struck = {everybody[i]: None for i in state["suspects"]}
    _thaw_residents(core._residents, state, everybody)
    core._flights = deque(_thaw_flight(entry, everybody) for entry in state["flights"])
    return core


def hello_of(fields: State_) -> Hello:
    """A Hello from its fields."""
    return replace(Hello(**fields), eos_token_ids=tuple(fields["eos_token_ids"]))


def _thaw_sequence(entry: list[Any]) -> Sequence:
    *request, state, num_tokens, blocks, keys, values = entry
    fields = dict(zip(_PLAIN, values, strict=True))
    key, number = fields.pop("rank")
    sequence = Sequence(blank(number, *request), (key, number), 0.0)
    sequence.tokens = [NORMAL] * num_tokens
    sequence.state = State(state)
    sequence.blocks = list(blocks)
    sequence.keys = [bytes.fromhex(key) for key in keys]
    for name, value in fields.items():
        setattr(sequence, name, value)
    return sequence


def _thaw_residents(residents: Residents, state: State_, everybody: list[Sequence]) -> None:
    num_blocks, block_size = state["pool"]["sizes"]
    num_slots, free_slots = state["slots"]
    residents.open(num_slots, num_blocks, block_size)
    residents.free_slots = free_slots
    residents.running = {everybody[i]: None for i in state["running"]}
    residents.loose = {everybody[i]: None for i in state["loose"]}
    residents._doubts = [RowsInFlight(everybody[i], last_step) for i, last_step in state["doubts"]]
    _thaw_pool(residents.pool, state["pool"], residents._doubts)
    members, beat, step, heard = state["decoding"]
    decoding = residents.decoding
    decoding.beat, decoding._step, decoding._heard = beat, step, tuple(heard)
    for i in members:
        decoding.enter(everybody[i])


def _thaw_pool(pool: BlockPool, state: State_, doubts: list[RowsInFlight]) -> None:
    tokens = (NORMAL,) * pool.block_size
    pool._references = state["references"]
    pool._empty = deque(state["empty"])
    pool._cached = OrderedDict.fromkeys(state["cached"])
    pool._published = {block: (bytes.fromhex(key), tokens) for block, key in state["published"]}
    pool._by_key = {key: block for block, (key, _) in pool._published.items()}
    pool._dirty = set(state["dirty"])
    pool._doubts = {block: doubts[i] for block, i in state["doubts"]}
    pool._to_zero = state["to_zero"]


def _thaw_flight(state: State_, everybody: list[Sequence]) -> Flight:
    members, slots, origins, firsts = state["crew"]
    sequences = tuple(everybody[i] for i in members)
    ids, outputs = tuple(s.request.request_id for s in sequences), tuple(s.tokens for s in sequences)
    stops = tuple(s.stops for s in sequences)
    step, beat, num_tokens, kv_tokens = state["numbers"]
    return Flight(
        step,
        beat,
        Crew(sequences, ids, outputs, stops, tuple(slots), tuple(origins), tuple(firsts)),
        [everybody[i] for i in state["filling"]],
        [(everybody[i], residence, end) for i, residence, end in state["owners"]],
        [everybody[i] for i in state["samples"]],
        num_tokens,
        kv_tokens,
    )
