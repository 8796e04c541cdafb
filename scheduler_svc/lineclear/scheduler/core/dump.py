"""Copies of a core as plain values, without content, and cores in the state of such a copy.

One walker visits every object that the core's state refers to, by `__slots__` or `__dict__`. An object becomes
{class: values}, and one that is met again a reference to the first. Tokens become their number, and what a recording
must not have is left out: ids, sampling parameters, salts. What follows from the rest is left out too, and
`_rebuild` makes it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Collection
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from lineclear.scheduler.core import core_state, inflight_step, policies, running_batch, sequence, swap_space
from lineclear.scheduler.core.block_pool import ChildBlocks
from lineclear.scheduler.core.core_state import SharedState
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.prefix_keys import token_bytes
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request, Sequence, State
from lineclear.wire.messages import Sampling

BLANK_TOKEN, BLANK_STOP, BLANK_EOS = 0, 1, 2
"""The tokens of a loaded core."""
_BLANK_GRAMMAR = "blank"

_MODULES = core_state, inflight_step, policies, running_batch, sequence, swap_space
_CLASSES = {
    name: found
    for module in _MODULES
    for name, found in vars(module).items()
    if isinstance(found, type) and found.__module__.startswith("lineclear.")
}
_ATOMS = {int, float, str, bool, bytes, type(None)}
_COLLECTIONS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_SETS = {set, frozenset}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict)}
_SHARED = {"Sequence", "InflightRows"}
"""Classes whose objects several others refer to."""

_LEFT_OUT: dict[str, dict[str, Any]] = {
    "BlockPool": dict.fromkeys(("_by_key", "_children", "_planned", "_tokens")),
    "CoreLimits": {"cache_secret": b""},
    "DecodeBatch": dict.fromkeys(("_by_last_step", "_by_remainder", "_cached_rows", "_sum_of_offsets", "resting")),
    "DecodeRows": dict.fromkeys(("request_ids", "stop_token_ids", "token_lists")),
    "Request": {
        "request_id": "",
        "eos_ids": frozenset({BLANK_EOS}),
        "stop_ids": frozenset({BLANK_STOP}),
        "cache_salt": b"",
    },
    "RequestQueue": {"_keys": None},
    "RunningBatch": dict.fromkeys(("_block_hash", "_choose_donor")),
    "Sequence": {"stop_token_ids": frozenset({BLANK_STOP, BLANK_EOS})},
}
"""By class: the fields that a copy lacks, with their values in a loaded core until `_rebuild`."""


def _keys_of(blocks: dict[int, tuple[list[bytes], list[bytes]]]) -> list[tuple[int, list[bytes]]] | None:
    return [(size, keys) for size, (keys, _) in blocks.items()] or None


def _blank_blocks(keys_by_size: list[tuple[int, list[bytes]]] | None) -> dict[int, tuple[list[bytes], list[bytes]]]:
    return {size: (keys, [_blank_block(size)] * (len(keys) - 1)) for size, keys in keys_by_size or ()}


def _blank_block(size: int) -> bytes:
    return token_bytes((BLANK_TOKEN,) * size)


def _blank_sampling(is_constrained: bool) -> Sampling:
    return Sampling(stop_ids=(BLANK_STOP, BLANK_EOS), grammar=_BLANK_GRAMMAR if is_constrained else "")


_Change = Callable[[Any], Any]
_SHORTENED: dict[str, dict[str, tuple[_Change, _Change]]] = {
    "DecodeBatch": {"_rows": (list, list)},
    "Request": {
        "prompt": (len, lambda count: (BLANK_TOKEN,) * count),
        "output": (len, lambda count: (BLANK_TOKEN,) * count),
        "sampling": (lambda sampling: sampling.grammar != "", _blank_sampling),
    },
    "Sequence": {
        "boundaries": (list, tuple),
        "leading_blocks": (_keys_of, _blank_blocks),
        "queue_key": (list, tuple),
        "state": (attrgetter("_value_"), State),
        "tokens": (len, lambda count: [BLANK_TOKEN] * count),
    },
}
"""By class: the fields that a copy has in another form, with the functions to it and back."""


class _Layout(NamedTuple):
    """The fields of a class in a copy."""

    names: tuple[str, ...]
    values: Callable[[Any], Iterable[Any]]
    changes: tuple[tuple[int, _Change], ...]
    is_ordered: bool
    """Whether the class says its fields and their order; else a copy names them."""
    is_shared: bool


_LAYOUTS: dict[type, _Layout] = {}


def _layout(kind: type, value: object) -> _Layout:
    left_out, shortened = _LEFT_OUT.get(kind.__name__, {}), _SHORTENED.get(kind.__name__, {})
    names = tuple(name for name in _slots(kind) or vars(value) if name not in left_out)
    values = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]
    changes = tuple((names.index(name), change) for name, (change, _) in shortened.items())
    layout = _Layout(names, values, changes, _slots(kind) != (), kind.__name__ in _SHARED)
    return _LAYOUTS.setdefault(kind, layout)


def _slots(kind: type) -> tuple[str, ...]:
    """Return the fields of a NamedTuple or of a class with slots; nothing for another class."""
    return tuple(getattr(kind, "_fields", ()) or getattr(kind, "__slots__", ()))


class _Writer:
    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # id of a shared object -> how many were met before it

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        name = kind.__name__
        if name in _COLLECTIONS:
            return self._all(value) if kind is list else {name: self._all(sorted(value) if kind in _SETS else value)}
        if name in _MAPPINGS:
            return {name: [self._all(entry) for entry in value.items()]}
        return {name: value.value} if isinstance(value, Enum) else self._object(kind, value)

    def _object(self, kind: type, value: Any) -> Any:
        layout = _LAYOUTS.get(kind) or _layout(kind, value)
        if layout.is_shared:
            if (place := self._places.get(id(value))) is not None:
                return {"same": place}
            self._places[id(value)] = len(self._places)
        values = list(layout.values(value))
        for index, change in layout.changes:
            values[index] = change(values[index])
        copies = self._all(values)
        return {kind.__name__: copies if layout.is_ordered else dict(zip(layout.names, copies, strict=True))}

    def _all(self, values: Iterable[Any]) -> list[Any]:
        if _ATOMS.issuperset(map(type, values)):
            return list(values)
        return [value if type(value) in _ATOMS else self.write(value) for value in values]


class _Reader:
    """Makes the state of a copy that went through JSON."""

    def __init__(self) -> None:
        self.shared: list[Any] = []

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.read(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        ((name, state),) = value.items()
        if name == "same":
            return self.shared[state]
        if name == "bytes":
            return bytes.fromhex(state)
        if name in _MAPPINGS:
            return _MAPPINGS[name]((self.read(key), self.read(entry)) for key, entry in state)
        if name in _COLLECTIONS:
            return _COLLECTIONS[name](map(self.read, state))
        kind = _CLASSES[name]
        return kind(state) if issubclass(kind, Enum) else self._object(kind, state)

    def _object(self, kind: type, state: Any) -> Any:
        left_out, shortened = _LEFT_OUT.get(kind.__name__, {}), _SHORTENED.get(kind.__name__, {})
        if not isinstance(state, dict):
            state = dict(zip([name for name in _slots(kind) if name not in left_out], state, strict=True))
        if issubclass(kind, tuple):
            return kind(**{name: self.read(entry) for name, entry in state.items()}, **left_out)
        made = kind.__new__(kind)
        if kind.__name__ in _SHARED:
            self.shared.append(made)
        for name, entry in state.items():
            value = self.read(entry)
            object.__setattr__(made, name, shortened[name][1](value) if name in shortened else value)
        for name, value in left_out.items():
            object.__setattr__(made, name, value)
        return made


def dump(value: object) -> Any:
    """Return a copy of a value of the core, such as a Request: JSON's types and bytes."""
    return _Writer().write(value)


def load(copied: Any) -> Any:
    """Return the value of a copy that went through JSON, in which bytes became {"bytes": hexadecimal}."""
    return _Reader().read(copied)


def load_request(copied: Any, number: int) -> Request:
    """Return the request of a copy, with blank tokens and its number of arrival as id."""
    request: Request = load(copied)
    return replace(request, request_id=str(number))


def dump_core(core: Scheduler) -> Any:
    """Return a copy of a core, but for events that were not drained: a few microseconds per live request."""
    return dump([core._num_arrivals, core._state, core._vacant])


def load_core(core: Scheduler, copied: Any) -> None:
    """Bring a new core into the state of a copy that went through JSON; all tokens are blank."""
    reader = _Reader()
    core._num_arrivals, state, core._vacant = reader.read(copied)
    for name in SharedState.__slots__:
        setattr(core._state, name, getattr(state, name))
    sequences = [value for value in reader.shared if isinstance(value, Sequence)]
    _rebuild(core, sorted(sequences, key=lambda s: s.number))


def _rebuild(core: Scheduler, sequences: Collection[Sequence]) -> None:
    """Make what follows from the rest of the state."""
    state, requests = core._state, core._live
    core.limits = state.limits
    for s in sequences:
        s.request = replace(s.request, request_id=str(s.number))
    live = [s for s in sequences if s.state is not State.FINISHED]
    requests.by_id = {s.request.request_id: s for s in live}
    requests._num_search_steps = sum(s.request.is_search_step for s in live)
    deadlines = [(s.request.deadline, s.number, s) for s in live if s.request.deadline is not None]
    requests.deadlines = sorted(deadlines)  # a sorted list is a heap
    for queue in (state.fresh, state.resuming):
        queue.sort()
    for worker in (*state.workers.values(), *core._vacant):
        _rebuild_batch(worker.batch, core)
        for step in worker.inflight:
            members = step.decode_rows.sequences
            step.decode_rows = step.decode_rows._replace(
                request_ids=tuple(s.request.request_id for s in members),
                token_lists=tuple(s.tokens for s in members),
                stop_token_ids=tuple(s.stop_token_ids for s in members),
            )


def _rebuild_batch(batch: RunningBatch, core: Scheduler) -> None:
    batch._block_hash, batch._choose_donor = core._block_hash, core._choose_donor
    pool, members = batch.pool, batch.decode_batch
    blank = _blank_block(pool.block_size)
    pool._by_key = {key: block for block, key in enumerate(pool._keys) if key is not None}
    pool._tokens = [b"" if key is None else blank for key in pool._keys]
    pool._children = ChildBlocks(pool.num_blocks, pool.min_copied)  # replays have recorded donors
    pool._planned = []
    batch.decode_batch = rebuilt = DecodeBatch(pool.block_size)
    rebuilt.decode_step, rebuilt._step, rebuilt._confirmed = members.decode_step, members._step, members._confirmed
    for member in members._rows:
        rebuilt._add(member)
