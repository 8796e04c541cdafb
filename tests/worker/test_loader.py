"""A model that could not be served correctly is refused at load, with a sentence that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from structlog.testing import capture_logs
from support.families import VOCAB_SIZE, tiny_config, tiny_model

from lineclear.model_files.config_check import UNSUPPORTED
from lineclear.worker.model import loader
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import load, wrap_model

CPU = torch.device("cpu")


def saved(directory: Path, family: str = "llama", **config_changes: Any) -> Path:
    tiny_model(family).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config_changes))
    return directory


def refusal(source: str | Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        load(str(source), CPU, None)
    return str(caught.value)


def tiny(kind: Any, **changes: Any) -> Any:
    """Return a configuration of a family without a tested one."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return kind(**sizes | heads | changes)


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config)


def test_properties_of_a_checkpoint(tmp_path: Path) -> None:
    loaded = load(str(saved(tmp_path / "tiny-llama")), CPU, None)
    assert (loaded.model_id, loaded.family, loaded.vocab_size) == ("tiny-llama", "llama", VOCAB_SIZE)
    assert (loaded.max_model_len, loaded.eos_token_ids, loaded.dtype) == (256, (2,), torch.float32)
    assert loaded.selects_rows


def test_dtype_defaults_to_the_checkpoints(tmp_path: Path) -> None:
    for dtype, read_as in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)):
        tiny_model("llama", dtype=dtype).save_pretrained(tmp_path)
        assert load(str(tmp_path), CPU, None).dtype is read_as
    assert load(str(tmp_path), CPU, torch.float16).dtype is torch.float16
    assert load(str(tmp_path), CPU, torch.float32).dtype is torch.float32


def test_eos_ids_come_from_the_generation_config() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 5, VOCAB_SIZE + 3]
    assert wrap_model(model).eos_token_ids == (5, 7)


def test_max_model_len_can_only_shorten_the_context() -> None:
    assert wrap_model(tiny_model("llama"), max_model_len=100).max_model_len == 100
    with pytest.raises(ModelRefused, match="--max-model-len 300 is more than the 256 positions"):
        wrap_model(tiny_model("llama"), max_model_len=300)


def test_length_dependent_rope_limits_the_context() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    positions = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    config = tiny(tf.Phi3Config, pad_token_id=0, num_attention_heads=6, rope_parameters=rope, **positions)
    assert wrap_model(from_config(config)).max_model_len == 64


def test_unverified_family_logs_a_warning() -> None:
    with capture_logs() as lines:
        assert wrap_model(from_config(tiny(tf.BioGptConfig))).family == "biogpt"
    assert [line["event"] for line in lines] == ["model_family_not_verified"]


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "gpt_oss", "llama", "qwen3_moe"])
def test_weights_read_straight_to_the_device_are_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number format; experts are merged, and embeddings are tied, as the checkpoint wants."""
    directory = saved(tmp_path, family)
    through_host, places = load(str(directory), CPU, torch.bfloat16).model, []
    original = tf.AutoModelForCausalLM.from_pretrained

    def on_the_cpu(*arguments: Any, device_map: Any, **others: Any) -> Any:
        places.append(device_map)
        return original(*arguments, device_map=CPU, **others)

    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", on_the_cpu)
    direct = load(str(directory), torch.device("cuda"), torch.bfloat16).model
    assert places == [torch.device("cuda")]
    for values in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(direct, values)()), dict(getattr(through_host, values)())
        assert ours.keys() == theirs.keys(), "tied weights are listed once"
        for name, tensor in ours.items():
            assert tensor.dtype is theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name
    assert direct.generation_config.to_dict() == through_host.generation_config.to_dict()


def test_weights_go_through_host_memory_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "is_accelerate_available", lambda: False)
    with capture_logs() as lines:
        assert [loader._can_read_directly(torch.device(name)) for name in ("cuda", "cpu")] == [False, False]
    assert [line["event"] for line in lines] == ["weights_read_through_host_memory"]


def test_nothing_is_downloaded() -> None:
    assert "not a directory and not in the local cache" in (found := refusal("nobody/nothing-here"))
    assert "nothing is downloaded at start" in found


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin, which is pickle and may run code" in refusal(tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    assert "is empty" in refusal(tmp_path)
    tiny_model("llama").config.save_pretrained(tmp_path)
    assert "lacks *.safetensors." in refusal(tmp_path)


CODE = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}


def test_required_custom_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('this ran')")
    assert "code from a checkpoint is never run" in refusal(saved(tmp_path, model_type="mine", auto_map=CODE))


def test_unneeded_custom_code_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('this ran')")
    assert load(str(saved(tmp_path, auto_map=CODE)), CPU, None).family == "llama"


def test_unknown_quantization_is_refused(tmp_path: Path) -> None:
    changes = {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    assert "quantized" in refusal(saved(tmp_path, **changes))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    weights = saved(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors has 1000 bytes, fewer than its header; it is cut short" in refusal(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    assert "lacks weights" in refusal(saved(tmp_path, num_hidden_layers=3))


def bidirectional() -> Any:
    config = tiny_config("gemma3_text")
    config.use_bidirectional_attention = True
    return config


SPARSE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip
CUSTOM = "0 of the model's 2 layers call the attention interface|has a custom attention"
UNREAD = {
    "falcon": (tiny(tf.FalconConfig), CUSTOM),
    "bloom": (tiny(tf.BloomConfig, n_layer=2, n_head=4), CUSTOM),
    "gptj": (tiny(tf.GPTJConfig, n_embd=48, n_layer=2, n_head=4, n_positions=64, rotary_dim=4), CUSTOM),
    "mpt": (tf.MptConfig(vocab_size=VOCAB_SIZE, d_model=48, n_heads=4, n_layers=2), CUSTOM),
}
"""Types that the check of config.json refuses without a look at the model, and what the probe says of them."""
REFUSED = [
    *UNREAD.values(),
    (tiny(tf.DeepseekV32Config, **SPARSE), r"sparse attention \(DeepSeek Sparse Attention\)"),
    (tiny(tf.DiffLlamaConfig), "an attention module computes more than once, .* differential attention"),
    (tiny(tf.MiniMaxConfig, num_local_experts=2), "layers of type MiniMaxLightningAttention are not supported"),
    (
        tf.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2),
        "states no context length; set --max-model-len",
    ),
    (bidirectional(), "attends to later tokens"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda x: getattr(x, "model_type", ""))
def test_unsupported_attention_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        wrap_model(from_config(config))


def test_types_that_are_refused_unread_are_refused_by_the_probe() -> None:
    assert {config.model_type for config, _ in UNREAD.values()} == set(UNSUPPORTED)


def test_window_only_in_the_mask_is_refused() -> None:
    config = tiny_config("llama")
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = 8
    with pytest.raises(ModelRefused, match="does not pass it to its attention"):
        wrap_model(from_config(config))


def test_recurrent_state_is_refused() -> None:
    """Each token's embedding is mixed with that of the token before: invisible to the interface, seen by the probe."""
    model = tiny_model("llama")
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output + output.roll(1, dims=1))
    with pytest.raises(ModelRefused, match="its logits over paged attention are not its own"):
        wrap_model(model)


def test_too_few_embeddings_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = torch.nn.Linear(48, VOCAB_SIZE + 5)
    with pytest.raises(ModelRefused, match="no embedding for"):
        wrap_model(model)
