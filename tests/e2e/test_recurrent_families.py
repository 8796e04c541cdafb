"""Every family with a recurrent state answers token for token like transformers' `generate`.

In any batching and chunking, after a preemption, behind a copied state, and in slots that another owner left NaN in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from e2e.test_families import GREEDY, LIMITS, MAX_TOKENS, Capturable, greedy, prompts
from e2e.transformers_answers import generated
from support.families import CONTEXT, RECURRENT_CONFIGS, tiny_model
from support.graphs import recorded
from support.inprocess import InProcess
from support.steps_by_hand import Steps

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Row, RowOutput, SlotInit, StateCopy, StepErrorKind
from lineclear.worker.attention.registry import BACKENDS
from lineclear.worker.device.staging import Staging
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

BLOCK_SIZE, NUM_SLOTS, NUM_SNAPSHOTS = 4, 8, 3
OPTIONS = RunnerOptions(
    num_blocks=128, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, num_state_snapshots=NUM_SNAPSHOTS, max_step_tokens=512
)


@dataclass(frozen=True)
class Family:
    """A tiny model and the answers of transformers."""

    loaded: LoadedModel
    requests: list[Request]
    expected: dict[str, list[int]]

    def runner(self, num_blocks: int = OPTIONS.num_blocks, **parts: Any) -> ModelRunner:
        return ModelRunner(self.loaded, replace(OPTIONS, num_blocks=num_blocks), **parts)

    def server(self, limits: CoreLimits = LIMITS, **parts: Any) -> InProcess:
        return InProcess(self.runner(**parts), limits)


@pytest.fixture(scope="module", params=sorted(RECURRENT_CONFIGS), name="family")
def make_family(request: pytest.FixtureRequest) -> Family:
    asked = [greedy(f"greedy-{i}", prompt) for i, prompt in enumerate(prompts())]
    expected = generated(tiny_model(request.param), asked, eos_token_id=2)
    return Family(wrap_model(tiny_model(request.param), max_model_len=CONTEXT), asked, expected)


def test_alone(family: Family) -> None:
    server = family.server()
    for x in family.requests:
        assert server.serve([x])[x.request_id] == family.expected[x.request_id]


def test_in_one_batch(family: Family) -> None:
    server = family.server(replace(LIMITS, pipeline_depth=3))
    assert server.serve(family.requests) == family.expected
    assert max(len(plan.rows) for plan in server.plans) == len(family.requests)


@pytest.mark.parametrize("tokens", [1, 7])
def test_with_prompts_in_chunks(family: Family, tokens: int) -> None:
    server = family.server(replace(LIMITS, target_batch_tokens=tokens))
    assert server.serve(family.requests) == family.expected
    assert all(sum(row.num_tokens for row in plan.rows) <= tokens for plan in server.plans)


def test_with_preemption(family: Family) -> None:
    server = family.server(num_blocks=20)
    twice = family.requests + [replace(x, request_id=f"again-{x.request_id}") for x in family.requests]
    answers = server.serve(twice)
    assert {name.removeprefix("again-"): tokens for name, tokens in answers.items()} == family.expected
    assert {name: answers[name] for name in family.expected} == family.expected
    assert server.counters.preemptions > 0


def test_after_the_loss_of_the_worker(family: Family) -> None:
    assert family.server().serve(family.requests, lose_worker_after_steps=6) == family.expected


def test_in_states_that_are_not_finite(family: Family) -> None:
    """As another owner may have left them."""
    runner = family.runner()
    states = runner._states
    assert states is not None
    for pool in (pool for layer in states.pools for pool in layer):
        pool.fill_(float("nan"))
    assert InProcess(runner, LIMITS).serve(family.requests) == family.expected


def test_with_decode_steps_from_graphs(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture runs a step twice, and padding rows have a state of their own."""
    monkeypatch.setitem(BACKENDS, "torch_paged", Capturable)
    monkeypatch.setattr(Capturable, "seen", [])
    graphs, staging = DecodeGraphs([1, 3, 8], recorded), Staging(torch.device("cpu"), 1 << 20, is_direct=False)
    server = family.server(replace(LIMITS, pipeline_depth=2), staging=staging, graphs=graphs)
    assert server.serve(family.requests) == family.expected
    for x in family.requests:
        again = server.serve([replace(x, request_id=f"again-{x.request_id}")])
        assert list(again.values()) == [family.expected[x.request_id]]
    decodes = [x for x in server.plans if x.num_rows and x.num_tokens == x.num_rows and all(y.sample for y in x.rows)]
    assert graphs.num_replays == len(decodes) > 20
    assert staging.num_copies == len(server.plans)


def init(slot: int, prompt: Sequence[int], blocks: Sequence[int] = ()) -> SlotInit:
    return SlotInit(slot, tuple(prompt), len(prompt), tuple(blocks), GREEDY)


def blocks(first: int, positions: int) -> tuple[int, ...]:
    return tuple(range(first, first + -(-positions // BLOCK_SIZE)))


def test_behind_a_copied_state(family: Family) -> None:
    """Two sequences continue a prefix in the middle: one from the state of a slot, the other later from a snapshot."""
    prompt, shared = family.requests[3].prompt, 3 * BLOCK_SIZE
    steps, size = Steps(family.runner()), len(prompt) + MAX_TOKENS
    snapshot = NUM_SLOTS + NUM_SNAPSHOTS - 1
    steps.run(Row(5, 0, shared, RowOutput.NONE, blocks(0, size)), inits=[init(5, prompt)])
    other = Row(2, shared, len(prompt) - shared, RowOutput.SAMPLE, blocks(20, size - shared))
    own = Row(5, shared, len(prompt) - shared, RowOutput.SAMPLE)
    kept = StateCopy(5, 2), StateCopy(5, snapshot)
    steps.run(other, own, inits=[init(2, prompt, blocks(0, shared))], copies=kept)
    steps.decode(2, 5)
    third = Row(0, shared, len(prompt) - shared, RowOutput.SAMPLE, blocks(40, size - shared))
    steps.run(third, inits=[init(0, prompt, blocks(0, shared))], copies=[StateCopy(snapshot, 0)])
    for _ in range(MAX_TOKENS - 2):
        steps.decode(0, 2, 5)
    steps.decode(0)
    expected = family.expected["greedy-3"]
    for slot in (0, 2, 5):
        assert steps.outputs[slot][: len(expected)] == expected


def test_copies_read_before_they_write(family: Family) -> None:
    """A slot's state is kept in the plan that gives the slot to another sequence, and snapshots change places."""
    (a, b), shared = (family.requests[i].prompt for i in (3, 2)), 2 * BLOCK_SIZE
    steps, (one, two) = Steps(family.runner()), (NUM_SLOTS, NUM_SLOTS + 1)
    chunk_a, chunk_b = (Row(i, 0, shared, RowOutput.NONE, blocks(20 * i, 60)) for i in (0, 1))
    steps.run(chunk_a, chunk_b, inits=[init(0, a), init(1, b)])
    steps.run(copies=[StateCopy(0, two), StateCopy(1, one)])
    steps.run(copies=[StateCopy(one, two), StateCopy(two, one)])
    rest = [Row(i, shared, len(x) - shared, RowOutput.SAMPLE, blocks(50 + 20 * i, 60)) for i, x in ((0, b), (1, a))]
    inits = [init(0, b, blocks(20, shared)), init(1, a, blocks(0, shared))]
    steps.run(*rest, inits=inits, copies=[StateCopy(two, 0), StateCopy(one, 1)])
    for _ in range(MAX_TOKENS - 1):
        steps.decode(0, 1)
    for slot, name in ((0, "greedy-2"), (1, "greedy-3")):
        assert steps.outputs[slot][: len(family.expected[name])] == family.expected[name]


@pytest.mark.parametrize(
    ("copies", "cached", "problem"),
    [
        ([], 2, "starts at 8 with a state behind 0 positions"),
        ([(NUM_SLOTS, 1)], 2, "starts at 8 with a state behind -1 positions"),
        ([(0, 1)], 2, "starts at 8 with a state behind 12 positions"),
        ([(0, 1)], 0, "starts at 0 with a state behind 12 positions"),
        ([(0, 3)], 0, "a copy to the recurrent state of a sequence that runs"),
        ([(0, NUM_SLOTS), (1, NUM_SLOTS)], 0, "two copies to one recurrent state"),
        ([(0, NUM_SLOTS + NUM_SNAPSHOTS)], 0, "a copy of a recurrent state that does not exist"),
        ([(-1, NUM_SLOTS)], 0, "a copy of a recurrent state that does not exist"),
    ],
)
def test_states_that_do_not_fit_are_refused(copies: list[tuple[int, int]], cached: int, problem: str) -> None:
    loaded = wrap_model(tiny_model("lfm2"))
    steps, prompt = Steps(ModelRunner(loaded, OPTIONS)), prompts()[3]
    steps.run(Row(0, 0, 12, RowOutput.NONE, blocks(0, 12)), inits=[init(0, prompt)])
    row = Row(1, cached * BLOCK_SIZE, 4, RowOutput.NONE, (9,))
    with pytest.raises(StepFailed, match=problem) as caught:
        steps.run(row, inits=[init(1, prompt, range(cached))], copies=[StateCopy(*x) for x in copies])
    assert caught.value.kind is StepErrorKind.PROTOCOL
