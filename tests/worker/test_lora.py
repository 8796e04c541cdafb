"""Adapters on the rows of a batch, against PEFT's own outputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support import gguf_files, quantized_checkpoints
from support.adapters import ALL_LINEAR, peft_answer, save_adapter
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from support.kernel_variants import needs_kernels
from transformers import AutoModelForCausalLM

from lineclear.model_files import adapter_files
from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.scheduler.core.events import Pooled, Scored
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request, Scoring
from lineclear.wire.messages import Pooling, PoolingKind, Row, Sampling, SlotInit, StepErrorKind, StepPlan
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.loader import build_fused, load, to_quantized, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FAMILIES = {"llama": ALL_LINEAR, "qwen2": ALL_LINEAR, "phi3": PHI3, "olmo2": ALL_LINEAR}
MAX_TOKENS = 10


def prompts(count: int) -> list[tuple[int, ...]]:
    torch.manual_seed(5)
    return [tuple(torch.randint(3, 200, (5 + 2 * i,)).tolist()) for i in range(count)]


def runner_of(family: str, *, fused: bool, **sizes: Any) -> ModelRunner:
    loaded = wrap_model(tiny_model(family, **WIDE))
    if fused:
        found = build_fused(loaded)
        assert found is not None
        loaded = found
    return ModelRunner(loaded, RunnerOptions(**{"num_blocks": 64} | sizes))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path | None]]:
    """Return two adapters of a family, of other ranks and modules, and none."""
    made: dict[str, list[Path | None]] = {}

    def of(family: str) -> list[Path | None]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            targets = FAMILIES[family]
            first = save_adapter(tiny_model(family, **WIDE), folder / "a", 1, targets)
            second = save_adapter(
                tiny_model(family, **WIDE), folder / "b", 2, targets[:2], r=5, lora_alpha=7, use_rslora=True
            )
            made[family] = [first, None, second]
        return made[family]

    return of


@cache
def answers_of_peft(family: str, adapters: Callable[[str], list[Path | None]]) -> dict[str, list[int]]:
    """Return the answers to 16 prompts, with two adapters and none in turn."""
    make_model, paths = partial(tiny_model, family, **WIDE), adapters(family)
    found = {str(i): peft_answer(make_model, paths[i % 3], x, MAX_TOKENS) for i, x in enumerate(prompts(16))}
    assert found["0"] != peft_answer(make_model, None, prompts(1)[0], MAX_TOKENS), "the adapter changes the answer"
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "transformers"])
@pytest.mark.usefixtures("best_and_none")
def test_batch_of_two_adapters_and_the_model_equals_peft(
    family: str, fused: bool, adapters: Callable[[str], list[Path | None]]
) -> None:
    chosen = [adapters(family)[i % 3] for i in range(16)]
    for limits in (CoreLimits(), CoreLimits(target_batch_tokens=7)):
        server = InProcess(runner_of(family, fused=fused), limits)
        keys = {path: b"" if path is None else server.load_adapter(path) for path in dict.fromkeys(chosen)}
        requests = [
            Request(str(i), prompt, Sampling(), MAX_TOKENS, adapter=keys[path])
            for i, (path, prompt) in enumerate(zip(chosen, prompts(16), strict=True))
        ]
        assert server.serve(requests) == answers_of_peft(family, adapters)


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("qwen2", False)], ids=str)
def test_scores_and_vectors_of_adapters_equal_peft(
    family: str, fused: bool, adapters: Callable[[str], list[Path | None]]
) -> None:
    """Rows of each adapter and of none in one step, whole and in pieces."""
    asked, wanted = [], {}
    for i, prompt in enumerate(prompts(6)):
        path = adapters(family)[i % 3]
        logprobs, hidden = _peft_outputs(partial(tiny_model, family, **WIDE), path, prompt)
        wanted |= {f"score-{i}": logprobs, f"last-{i}": hidden[-1], f"mean-{i}": hidden.mean(dim=0)}
        asked += [
            (path, Request(f"score-{i}", prompt, Sampling(), 0, scoring=Scoring(0))),
            (path, Request(f"last-{i}", prompt, Sampling(), 0, pooling=Pooling(PoolingKind.LAST, 0, False))),
            (path, Request(f"mean-{i}", prompt, Sampling(), 0, pooling=Pooling(PoolingKind.MEAN, 0, False))),
            (path, Request(f"plain-{i}", prompt, Sampling(), 6)),
        ]
    for limits in (CoreLimits(), CoreLimits(target_batch_tokens=7)):
        server = InProcess(runner_of(family, fused=fused), limits)
        keys = {path: b"" if path is None else server.load_adapter(path) for path in dict.fromkeys(adapters(family))}
        server.serve([replace(request, adapter=keys[path]) for path, request in asked])
        found: dict[str, list[float]] = {}
        for event in server.events:
            if isinstance(event, Scored):
                found.setdefault(event.request_id, []).extend(event.scores.logprobs)
            elif isinstance(event, Pooled):
                found[event.request_id] = torch.frombuffer(bytearray(event.vector), dtype=torch.float32).tolist()
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), values, rtol=1e-4, atol=1e-4, msg=name)


@torch.inference_mode()
def _peft_outputs(
    make_model: Callable[[], Any], path: Path | None, prompt: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each token behind the first, and the hidden states behind the last norm."""
    base = make_model()
    model = base if path is None else PeftModel.from_pretrained(base, str(path))
    ids = torch.tensor([prompt])
    logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logprobs, base.model(ids).last_hidden_state[0]


def test_preemption_and_a_lost_worker_change_no_token(adapters: Callable[[str], list[Path | None]]) -> None:
    chosen = [adapters("llama")[i % 3] for i in range(6)]

    def served(num_blocks: int, lose: int, sampling: dict[str, Any]) -> tuple[dict[str, list[int]], int]:
        server = InProcess(runner_of("llama", fused=True, num_blocks=num_blocks, num_slots=8), CoreLimits())
        keys = {path: b"" if path is None else server.load_adapter(path) for path in dict.fromkeys(chosen)}
        requests = [
            Request(str(i), prompts(6)[i], Sampling(seed=i, **sampling), 30, adapter=keys[path])
            for i, path in enumerate(chosen)
        ]
        return server.serve(requests, lose_worker_after_steps=lose), server.counters.preemptions

    for sampling in ({}, {"temperature": 1.0, "top_p": 0.9}):
        expected, none = served(64, 0, sampling)
        assert none == 0
        assert served(64, 9, sampling)[0] == expected
        found, preemptions = served(8, 0, sampling)
        assert preemptions > 0
        assert found == expected


def test_row_does_not_depend_on_the_adapters_of_others(adapters: Callable[[str], list[Path | None]]) -> None:
    def logprobs(others: int) -> list[Any]:
        server = InProcess(runner_of("llama", fused=True), CoreLimits(prefix_cache=False))
        keys = [b"" if path is None else server.load_adapter(path) for path in adapters("llama")]
        requests = [
            Request(str(i), prompts(9)[i], Sampling(logprobs=3), MAX_TOKENS, adapter=keys[i % 3])
            for i in range(1 + others)
        ]
        server.serve(requests)
        return server.logprobs("0")

    assert logprobs(0) == logprobs(8)


@pytest.mark.parametrize("quantise", [False, True], ids=["bfloat16", "int8"])
def test_adapter_changes_quantised_and_bf16_models(quantise: bool, tmp_path: Path) -> None:
    """The product is that of the factors: its effect on the logits is as in fp32, within the format's error."""
    path = save_adapter(tiny_model("llama", **WIDE), tmp_path / "a", 1, size=0.05)

    def logprobs(dtype: torch.dtype, directory: Path | None) -> torch.Tensor:
        model = tiny_model("llama", **WIDE).to(dtype)
        loaded = wrap_model(model)
        built = to_quantized(loaded) if quantise and dtype == torch.bfloat16 else build_fused(loaded)
        assert built is not None
        server = InProcess(ModelRunner(built, RunnerOptions(num_blocks=64)))
        key = b"" if directory is None else server.load_adapter(directory)
        server.serve([Request("a", prompts(3)[2], Sampling(logprobs=0, allowed_ids=(7,)), 1, adapter=key)])
        return torch.tensor([entry.logprob for entry in server.logprobs("a")])

    change = logprobs(torch.float32, path) - logprobs(torch.float32, None)
    rounded = logprobs(torch.bfloat16, path) - logprobs(torch.bfloat16, None)
    torch.testing.assert_close(rounded, change, atol=0.08, rtol=0.1)


QUANTIZED = ("gptq4-asym-v1-act", "awq-gemm", "packed4-asym-group", "w8a8", "fp8-block", "gguf")


def quantized_model(form: str, folder: Path) -> tuple[Path, Callable[[], Any]]:
    """Write a quantized model; return its path, and what makes transformers' model with the dequantized matrices."""
    if form == "gguf":
        path = folder / "tiny.gguf"
        model = gguf_files.write(path, "llama", GGMLQuantizationType.Q4_K)
        return path, partial(deepcopy, model)
    path = quantized_checkpoints.write(folder, quantized_checkpoints.FORMATS[form], "llama", **WIDE)
    return path, partial(AutoModelForCausalLM.from_pretrained, path.parent / "plain", dtype=torch.float32)


@pytest.mark.parametrize("form", QUANTIZED)
def test_adapters_over_quantized_files_equal_peft_over_the_dequantized_model(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, make_model = quantized_model(form, tmp_path)
    first = save_adapter(make_model(), tmp_path / "a", 1)
    second = save_adapter(make_model(), tmp_path / "b", 2, ALL_LINEAR[:2], r=5, lora_alpha=7, use_rslora=True)
    chosen = [(first, None, second)[i % 3] for i in range(9)]
    expected = {str(i): peft_answer(make_model, chosen[i], prompts(9)[i], MAX_TOKENS) for i in range(9)}
    assert expected["0"] != peft_answer(make_model, None, prompts(1)[0], MAX_TOKENS), "the adapter changes the answer"
    for limits in (CoreLimits(), CoreLimits(target_batch_tokens=7)):
        loaded = load(str(path), torch.device("cpu"), torch.float32)
        assert loaded.weights
        server = InProcess(ModelRunner(loaded, RunnerOptions(num_blocks=64)), limits)
        keys = {path: b"" if path is None else server.load_adapter(path) for path in dict.fromkeys(chosen)}
        requests = [
            Request(str(i), prompts(9)[i], Sampling(), MAX_TOKENS, adapter=keys[path]) for i, path in enumerate(chosen)
        ]
        assert server.serve(requests) == expected


@needs_kernels
@pytest.mark.parametrize("form", [form for form in QUANTIZED if form != "fp8-block"])
def test_fused_pass_over_quantized_files_adds_what_peft_adds(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with activations of 8 bits: within their error, which is measured without adapters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, make_model = quantized_model(form, tmp_path)
    adapter = save_adapter(make_model(), tmp_path / "a", 1, size=0.1)
    fused = build_fused(load(str(path), torch.device("cpu"), torch.bfloat16))
    assert fused is not None
    assert fused.decoder is not None
    prompt, token = prompts(3)[2], 7
    found, wanted = {}, {}
    server = InProcess(ModelRunner(fused, RunnerOptions(num_blocks=64)))
    for name, directory in (("alone", None), ("adapted", adapter)):
        key = b"" if directory is None else server.load_adapter(directory)
        server.serve([Request(name, (*prompt, token), Sampling(), 0, adapter=key, scoring=Scoring(0))])
        scores = [e.scores.logprobs for e in server.events if isinstance(e, Scored) and e.request_id == name]
        found[name] = torch.tensor([value for part in scores for value in part])
        wanted[name] = _peft_outputs(make_model, directory, (*prompt, token))[0]
    error = {name: (found[name] - wanted[name]).norm() for name in found}
    change = (wanted["adapted"] - wanted["alone"]).norm()
    assert error["adapted"] < 2 * error["alone"] + 0.05 * change
    assert change > 5 * error["adapted"]


def test_unloaded_index_is_refused_and_replaced(adapters: Callable[[str], list[Path | None]]) -> None:
    runner = runner_of("llama", fused=True)
    first, _, second = adapters("llama")
    assert first is not None
    assert second is not None
    init = SlotInit(0, (5, 6, 7), 3, (), Sampling(logprobs=0), 1)

    def answer() -> Any:
        return runner.launch(StepPlan(1, 1, (Row(0, 0, 3, True, (3,)),), (init,))).result().logprobs

    with pytest.raises(StepFailed, match="adapter 1 is not loaded") as caught:
        answer()
    assert caught.value.kind is StepErrorKind.PROTOCOL
    found = []
    for path in (first, second, first):
        runner.load_adapter(1, adapter_files.read(path, 8).key, str(path))
        found.append(answer())
    assert found[0] == found[2] != found[1]
    runner.unload_adapter(1)
    with pytest.raises(StepFailed):
        answer()


def copied(source: Path | None, target: Path, **config: Any) -> Path:
    """Return a copy of an adapter with other settings."""
    assert source is not None
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases of the model"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 64}, "rank is 64, the limit is 16; raise --max-lora-rank"),
        ({"r": 4}, "which is not of rank 4"),
        ({"r": True}, "not a positive integer"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ],
)
def test_adapter_of_another_kind_is_refused(
    config: dict[str, Any], reason: str, adapters: Callable[[str], list[Path | None]], tmp_path: Path
) -> None:
    with pytest.raises(AdapterFilesRefused, match=reason):
        adapter_files.read(copied(adapters("llama")[0], tmp_path / "a", **config), 16)


def test_files_that_cannot_be_read_are_refused(adapters: Callable[[str], list[Path | None]], tmp_path: Path) -> None:
    source = adapters("llama")[0]
    with pytest.raises(AdapterFilesRefused, match="no such directory"):
        adapter_files.read(tmp_path / "none", 16)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterFilesRefused, match=r"no adapter_config\.json"):
        adapter_files.read(tmp_path / "empty", 16)
    pickled = copied(source, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(AdapterFilesRefused, match="pickle"):
        adapter_files.read(pickled, 16)
    cut = copied(source, tmp_path / "cut")
    (cut / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterFilesRefused, match="cut short"):
        adapter_files.read(cut, 16)
    (cut / "adapter_config.json").write_text("[1]")
    with pytest.raises(AdapterFilesRefused, match="not a JSON object"):
        adapter_files.read(cut, 16)


@pytest.mark.parametrize("fault", ["other tensor", "one factor", "changed", "not finite"])
def test_other_tensors_are_refused(fault: str, adapters: Callable[[str], list[Path | None]], tmp_path: Path) -> None:
    directory = copied(adapters("llama")[0], tmp_path / "a")
    file, runner = directory / "adapter_model.safetensors", runner_of("llama", fused=True)
    tensors, before = load_file(file), adapter_files.read(directory, 16).key
    changed, reason = {
        "other tensor": (tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "weight is no factor"),
        "one factor": (dict(list(tensors.items())[:1]), "only one factor"),
        "changed": ({name: tensor * 2 for name, tensor in tensors.items()}, "have changed"),
        "not finite": ({name: tensor / 0 for name, tensor in tensors.items()}, "not finite"),
    }[fault]
    save_file(changed, file)

    def load() -> None:
        key = before if fault == "changed" else adapter_files.read(directory, 16).key
        runner.load_adapter(1, key, str(directory))

    with pytest.raises(AdapterFilesRefused, match=reason):
        load()


def test_adapter_of_another_model_is_refused(adapters: Callable[[str], list[Path | None]]) -> None:
    runner = runner_of("llama", fused=True)
    first, phi = adapters("llama")[0], adapters("phi3")[0]
    assert first is not None
    assert phi is not None
    with pytest.raises(AdapterFilesRefused, match="no linear layer model"):
        runner.load_adapter(1, adapter_files.read(phi, 16).key, str(phi))
    small = ModelRunner(wrap_model(tiny_model("llama")), RunnerOptions(num_blocks=8))
    with pytest.raises(AdapterFilesRefused, match=r"features in the adapter, and \d+ to \d+ in the model"):
        small.load_adapter(1, adapter_files.read(first, 16).key, str(first))


@needs_kernels
def test_the_gate_of_shared_experts_is_adapted_by_hooks_alone(tmp_path: Path) -> None:
    """The fused pass adapts the shared experts themselves, and computes their gate as a router."""
    make_model = partial(tiny_model, "qwen2_moe", **WIDE)
    gate = save_adapter(make_model(), tmp_path / "gate", 1, ["shared_expert_gate"])
    shared = save_adapter(make_model(), tmp_path / "shared", 1, ["q_proj", "gate_proj", "up_proj", "down_proj"])
    fused = build_fused(wrap_model(make_model()))
    assert fused is not None
    server = InProcess(ModelRunner(fused, RunnerOptions(num_blocks=64)), CoreLimits())
    with pytest.raises(AdapterFilesRefused, match=r"no linear layer .*shared_expert_gate that can be adapted"):
        server.load_adapter(gate)
    by_hooks = InProcess(ModelRunner(wrap_model(make_model()), RunnerOptions(num_blocks=64)), CoreLimits())
    for found, path in ((server, shared), (by_hooks, shared), (by_hooks, gate)):
        prompt = tuple(range(5, 22))
        request = Request(path.name, prompt, Sampling(), 8, adapter=found.load_adapter(path))
        assert found.serve([request])[path.name] == peft_answer(make_model, path, prompt, 8)


def test_adapter_of_an_absorbed_matrix_is_refused(tmp_path: Path) -> None:
    """Latent attention does not call `kv_b_proj`; the other layers of the same attention are adapted."""
    refused = save_adapter(tiny_model("youtu"), tmp_path / "refused", 1, ["kv_b_proj"])
    taken = save_adapter(tiny_model("youtu"), tmp_path / "taken", 1, ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
    runner = ModelRunner(wrap_model(tiny_model("youtu")), RunnerOptions(num_blocks=64, block_size=4))
    with pytest.raises(AdapterFilesRefused, match=r"no linear layer model.layers.0.self_attn.kv_b_proj that can be"):
        runner.load_adapter(1, adapter_files.read(refused, 16).key, str(refused))
    server = InProcess(runner, CoreLimits(prefix_cache=False))
    key, prompt = server.load_adapter(taken), tuple(range(5, 22))
    request = Request("adapted", prompt, Sampling(), 8, adapter=key)
    assert server.serve([request])["adapted"] == peft_answer(lambda: tiny_model("youtu"), taken, prompt, 8)
