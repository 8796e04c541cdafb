"""Layers with a recurrent state: their packed forward passes, the memory of the states, and what they exclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.adapters import peft_answer, save_adapter
from support.families import CONTEXT, RECURRENT_CONFIGS, tiny_model
from support.inprocess import InProcess
from support.steps_by_hand import Steps
from torch import Tensor

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Row, RowOutput, Sampling, SlotInit
from lineclear.worker.attention.base import Chunk, block_bytes, pack_chunks
from lineclear.worker.device import memory_budget
from lineclear.worker.drafts.verification import Drafter
from lineclear.worker.kv_cache.pool_memory import fitting_blocks, fitting_snapshots
from lineclear.worker.model import compatibility_probe
from lineclear.worker.model.loaded_model import LoadedModel, ModelRefused
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.recurrent import convolution, gated_delta, states
from lineclear.worker.recurrent.mixers import MIXERS, recurrent_layers
from lineclear.worker.recurrent.states import RecurrentStates, Rows
from lineclear.worker.runner import self_test
from lineclear.worker.runner.deterministic import OneTokenRunner
from lineclear.worker.runner.draft_model import check_vocabulary
from lineclear.worker.runner.memory_profile import largest_step_bytes
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.self_test import SelfTestFailed
from lineclear.worker.structured_output.grammar_constraints import ConstraintTable

LIMITS = CoreLimits(prefix_cache=False)
PROMPT = tuple(range(3, 40))
LENGTHS = (70, 1, 64, 15), (1, 100, 49)
"""Rows of two sequences. Some are longer than the blocks that chunks are computed in."""


def loaded_of(family: str) -> LoadedModel:
    return wrap_model(tiny_model(family), max_model_len=CONTEXT)


@pytest.fixture(scope="module", name="loaded")
def make_loaded() -> LoadedModel:
    return loaded_of("qwen3_next")


@pytest.mark.parametrize("family", sorted(RECURRENT_CONFIGS))
@torch.inference_mode()
def test_packed_rows_equal_the_layers_own_forward_pass(family: str) -> None:
    model = tiny_model(family)
    layer = recurrent_layers(model)[-1]
    torch.manual_seed(1)
    sequences = [torch.randn(sum(lengths), model.config.hidden_size) for lengths in LENGTHS]
    expected = [layer.module(x[None])[0] for x in sequences]
    states = RecurrentStates([layer.mixer.state], 2, 0, 1, torch.device("cpu"))
    for pool in states.pools[0]:
        pool.fill_(float("nan"))
    layer.attach(states, 0)
    found: list[list[Tensor]] = [[], []]
    starts = [0, 0]
    for i in range(max(map(len, LENGTHS))):
        rows = sorted((lengths[i], slot) for slot, lengths in enumerate(LENGTHS) if i < len(lengths))
        chunks, inputs, first = [], [], 0
        for count, slot in rows:
            chunks.append(Chunk(first, count, starts[slot], np.array([slot])))
            inputs.append(sequences[slot][starts[slot] : starts[slot] + count])
            first += count
        batch = replace(pack_chunks([x._replace(blocks=np.zeros(64, np.int64)) for x in chunks], 4))
        states.start_step(replace(batch, table=np.array([slot for _, slot in rows])))
        outputs = layer.module(torch.cat(inputs)[None])[0].split([count for count, _ in rows])
        for (count, slot), output in zip(rows, outputs, strict=True):
            found[slot].append(output)
            starts[slot] += count
    for parts, wanted in zip(found, expected, strict=True):
        assert float((torch.cat(parts) - wanted).norm() / wanted.norm()) < 1e-5


def test_every_layer_is_tested() -> None:
    models = [tiny_model(family) for family in RECURRENT_CONFIGS]
    assert {type(layer.module).__name__ for model in models for layer in recurrent_layers(model)} == MIXERS.keys()


def test_state_that_is_lost_between_rows_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(inputs: Any, output: Tensor, rows: Rows, pool: Tensor, *kinds: Any) -> Tensor:
        return states.scan(inputs, output, rows, pool.clone(), *kinds)

    monkeypatch.setattr(gated_delta, "scan", scan)
    with pytest.raises(ModelRefused, match="keeps state or positions outside the attention interface"):
        loaded_of("qwen3_next")


def test_wrong_single_tokens_are_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gated_delta._step
    monkeypatch.setattr(gated_delta, "_step", lambda inputs, states: original(inputs, states).flip(-1))
    with pytest.raises(ModelRefused, match="its logits over paged attention are not its own"):
        loaded_of("qwen3_next")


def test_self_test_finds_states_of_another_slot(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = self_test.expected_answers(loaded)
    self_test.check(ModelRunner(loaded, RunnerOptions(num_blocks=64)), expected, loaded.dtype)
    start_step = RecurrentStates.start_step

    def mixed_up(states: RecurrentStates, batch: Any) -> None:
        start_step(states, batch)
        states.rows = states.rows._replace(single=states.rows.single.flip(0))

    monkeypatch.setattr(RecurrentStates, "start_step", mixed_up)
    with pytest.raises(SelfTestFailed, match="is wrong"):
        self_test.check(ModelRunner(loaded, RunnerOptions(num_blocks=64)), expected, loaded.dtype)


def test_a_model_can_be_probed_again(loaded: LoadedModel) -> None:
    again = wrap_model(loaded.model)
    assert torch.equal(compatibility_probe.paged_logits(again), compatibility_probe.paged_logits(loaded))


def test_states_take_memory_before_blocks(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunnerOptions(num_slots=4, block_size=16, kv_cache_memory_fraction=0.5)
    size, state = block_bytes(loaded.layers, 16, torch.float32), loaded.state_bytes
    free = 2 * (5 * state + 16 * size)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: free)
    snapshots = fitting_snapshots(loaded, options)
    assert snapshots == 4 * size // state > 0, "a quarter of the rest"
    assert fitting_blocks(loaded, options, None) == (16 * size - snapshots * state) // size
    assert fitting_blocks(loaded, replace(options, num_state_snapshots=0), None) == 16
    free = 2 * (5 * state + size) - 2
    with pytest.raises(
        ConfigurationError, match=rf"beside the {5 * state} bytes of recurrent states .*--max-batch-size"
    ):
        ModelRunner(loaded, options)


def test_hello_reports_states(loaded: LoadedModel) -> None:
    hello = ModelRunner(loaded, RunnerOptions(num_blocks=8, num_slots=4, num_state_snapshots=7)).hello(1)
    assert (hello.has_recurrent_state, hello.num_state_snapshots) == (True, 7)
    assert hello.kv_cache_bytes == 8 * block_bytes(loaded.layers, 16, torch.float32) + 12 * loaded.state_bytes
    plain = ModelRunner(wrap_model(tiny_model("llama")), RunnerOptions(num_blocks=8)).hello(1)
    assert (plain.has_recurrent_state, plain.num_state_snapshots) == (False, 0)


def test_states_of_large_models_are_few_snapshots_and_of_small_ones_many(loaded: LoadedModel) -> None:
    assert fitting_snapshots(loaded, RunnerOptions(num_slots=4)) == 64
    assert fitting_snapshots(wrap_model(tiny_model("llama")), RunnerOptions(num_slots=4)) == 0


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_largest_step_has_the_longest_context(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends, launch = loaded_of(family), list[int](), ModelRunner.launch

    def launched(runner: ModelRunner, plan: Any) -> Any:
        ends.append(plan.chunks[0].start + plan.chunks[0].num_tokens)
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    options = RunnerOptions(num_slots=4, max_step_tokens=40)
    peak: Any = lambda device: type("Peak", (), {"bytes": lambda self: 700 + 6 * model.state_bytes})()  # noqa: E731
    assert largest_step_bytes(model, options, peak_memory=peak) == 700
    assert min(ends) > CONTEXT - 16


@pytest.mark.parametrize(("family", "width"), [("qwen3_next", {"head_dim": 16}), ("lfm2", {"hidden_size": 96})])
def test_keys_and_values_of_8_bits_beside_states(family: str, width: dict[str, int]) -> None:
    loaded = wrap_model(tiny_model(family, **width), max_model_len=CONTEXT)
    asked = [Request(str(i), PROMPT[i : i + 7 * i + 2], Sampling(), 12) for i in range(5)]
    sizes = RunnerOptions(num_blocks=64, num_slots=4, kv_dtype=torch.int8)
    rounded = InProcess(ModelRunner(loaded, sizes), CoreLimits()).serve(asked)
    exact = InProcess(ModelRunner(loaded, replace(sizes, kv_dtype=None)), CoreLimits()).serve(asked)
    pairs = [pair for name in exact for pair in zip(rounded[name], exact[name], strict=True)]
    assert sum(a == b for a, b in pairs) > 0.9 * len(pairs)


def test_keys_and_values_of_8_bits_are_refused_without_attention() -> None:
    with pytest.raises(ModelRefused, match="a model without attention has no keys and values"):
        ModelRunner(loaded_of("mamba2"), RunnerOptions(num_blocks=8, kv_dtype=torch.int8))


def test_host_blocks_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ModelRefused, match="--swap-memory-bytes keeps KV blocks, and qwen3_next has a recurrent state"):
        ModelRunner(loaded, RunnerOptions(num_blocks=8, swap_memory_bytes=1 << 20))


@pytest.mark.parametrize("families", [("qwen3_next", "llama"), ("llama", "lfm2")])
def test_draft_models_are_refused(families: Sequence[str]) -> None:
    with pytest.raises(ModelRefused, match=rf"({families[0]}|{families[1]}) has one: leave --draft-model away"):
        check_vocabulary(*map(loaded_of, families))


def test_rows_that_may_verify_drafts_get_none(loaded: LoadedModel) -> None:
    """Although the answer repeats itself, so that prompt lookup would find some."""
    steps = Steps(ModelRunner(loaded, RunnerOptions(num_blocks=64)))
    prompt = (5, 6, 7, 8) * 5
    steps.run(Row(0, 0, 20, RowOutput.SAMPLE, (0, 1, 2)), inits=[SlotInit(0, prompt, 20, (), Sampling())])
    result = steps.run(Row(0, 20, 1, RowOutput.SAMPLE, num_drafts=3))
    assert (len(result.tokens), result.num_drafted) == (1, ())
    assert type(steps.runner._drafter) is Drafter


class LateThreads:
    """Masks that are ready after the third wait."""

    num_waits = 0

    def start(self, masks: Sequence[Any], take_tokens: Any) -> None:
        take_tokens()
        self.masks = masks

    def wait(self, masks: Sequence[Any], *, is_alone: bool) -> None:
        self.num_waits += 1
        if self.num_waits == 3:
            for mask in self.masks:
                mask.bits = np.full(1, 6, np.uint32)

    def is_overdue(self, mask: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("singles", "is_slow", "may_defer", "is_deferred"),
    [
        (None, False, True, True),
        ({3}, True, True, True),
        ({3}, False, True, False),
        ({1}, True, True, False),
        ({3}, True, False, False),
    ],
)
def test_rows_are_deferred_whose_state_can_be_brought_back(
    singles: set[int] | None, is_slow: bool, may_defer: bool, is_deferred: bool
) -> None:
    """Else the step waits: for quick masks, behind rows of several tokens, and with several ranks."""
    grammars: Any = type("Grammars", (), {"matcher": lambda self, grammar: None, "end_ids": ()})()
    threads: Any = LateThreads()
    table = ConstraintTable(grammars, 32, threads)
    table.may_defer = may_defer
    constraint: Any = type("Constraint", (), {"mask": None, "position": 5, "compiled": None, "is_slow": is_slow})()
    constraint.is_compiled, constraint.allowed = True, lambda words: None
    table.slots[3] = constraint
    pending = table.start([1, 3], [9, 5], lambda rows: list, singles)
    assert pending is not None
    masks = pending.result()
    assert (masks.rows, list(masks.deferred)) == (([], [1]) if is_deferred else ([1], []))
    assert list(pending.held) == [3] * is_deferred


def test_one_token_at_a_time_is_independent_of_the_batch(loaded: LoadedModel) -> None:
    """With `--deterministic`: log-probabilities to the last bit."""
    asked = [Request(str(i), PROMPT[i : i + 5 * i + 2], Sampling(logprobs=2), 6) for i in range(4)]
    sizes = RunnerOptions(num_blocks=64, num_slots=8)
    together = InProcess(OneTokenRunner(loaded, sizes), replace(LIMITS, target_batch_tokens=9))
    tokens = together.serve(asked)
    for x in asked:
        alone = InProcess(OneTokenRunner(loaded, sizes), LIMITS)
        assert alone.serve([x])[x.request_id] == tokens[x.request_id]
        assert alone.logprobs(x.request_id) == together.logprobs(x.request_id)
    assert tokens == InProcess(ModelRunner(loaded, sizes), LIMITS).serve(asked)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("granitemoehybrid", ("in_proj", "out_proj", "q_proj")),
        ("lfm2", ("in_proj", "out_proj", "w1")),
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj")),
        ("jamba", ("in_proj", "x_proj", "out_proj")),
    ],
)
def test_adapters_equal_peft(family: str, targets: Sequence[str], tmp_path: Path) -> None:
    path = save_adapter(tiny_model(family), tmp_path, 1, targets)
    prompts = [PROMPT, PROMPT[5:12], PROMPT[3:20]]
    chosen = [path, None, path]
    expected = {
        str(i): peft_answer(lambda: tiny_model(family), folder, prompt, 8)
        for i, (folder, prompt) in enumerate(zip(chosen, prompts, strict=True))
    }
    assert expected["0"] != peft_answer(lambda: tiny_model(family), None, PROMPT, 8)
    server = InProcess(
        ModelRunner(loaded_of(family), RunnerOptions(num_blocks=64)), replace(LIMITS, target_batch_tokens=7)
    )
    key = server.load_adapter(path)
    asked = [
        Request(str(i), prompt, Sampling(), 8, adapter=key if folder else b"")
        for i, (folder, prompt) in enumerate(zip(chosen, prompts, strict=True))
    ]
    assert server.serve(asked) == expected


def test_states_can_be_kept_and_restored() -> None:
    states = loaded_of("lfm2").make_states(4, 0, 1)
    assert states is not None
    pool = states.pools[0][0].zero_()
    states.start_step(pack_chunks([Chunk(0, 1, 1, np.zeros(1, np.int64)), Chunk(1, 1, 1, np.ones(1, np.int64))], 4))
    restore = states.keep()
    pool.fill_(1)
    restore()
    assert (pool[:2].sum(), pool[2:].min()) == (0, 1)


def test_convolution_without_a_bias_has_one_state_less_than_its_kernel() -> None:
    spec = convolution.convolution_state(torch.nn.Conv1d(6, 6, 4, groups=6))
    assert (spec.shape, spec.num_bytes) == ((6, 3), 72)
