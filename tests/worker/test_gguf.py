"""GGUF files written by the package `gguf`: their models answer as transformers' own, and damaged ones are refused."""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fuzz import model_files
from gguf import GGMLQuantizationType as Type
from support import gguf_files, small_tokenizers
from support.kernel_variants import needs_kernels
from tokenizers import Tokenizer

from lineclear.model_files import gguf_config, gguf_file, gguf_tokenizer, model_directory
from lineclear.model_files.gguf_file import TYPES, GgufBroken, read_head
from lineclear.model_files.gguf_tokenizer import _SPLITS
from lineclear.worker.model.compatibility_probe import eager_logits, paged_logits, relative_error
from lineclear.worker.model.loaded_model import LoadedModel, ModelRefused
from lineclear.worker.model.loader import build_fused, load
from lineclear.worker.quantization.gguf import matrix_of
from lineclear.worker.quantization.modules import QuantizedEmbedding, QuantizedLinear
from lineclear.worker.runner import self_test
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

CPU = torch.device("cpu")
BLOCKS = [kind for kind in Type if kind.name in {each.name for each in TYPES.values() if each.block > 1}]
CASES = [
    *(("llama", kind) for kind in (*BLOCKS, Type.F16, Type.BF16, Type.F32)),
    *((family, Type.Q4_K) for family in ("qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")),
    *((family, Type.Q8_0) for family in ("mixtral", "qwen3_moe", "qwen3")),
    *((family, Type.Q5_0) for family in ("qwen2", "gemma3_text")),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loaded_file(path: Path, dtype: torch.dtype | None = torch.float32) -> LoadedModel:
    return load(str(path), CPU, dtype)


def expect_same_answers(loaded: LoadedModel, model: Any) -> None:
    answers = self_test.expected_answers(loaded)
    assert len(answers) == 2
    for answer in answers:
        ids = torch.tensor([answer.prompt])
        own = model.generate(ids, max_new_tokens=len(answer.tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
        assert own[0, len(answer.prompt) :].tolist() == answer.tokens
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=64, block_size=4, num_slots=4, max_step_tokens=64))
    self_test.check(runner, answers, loaded.dtype)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_are_those_of_the_reference_reader(kind: Type) -> None:
    dice = np.random.default_rng(kind.value)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = dice.integers(0, 256, (6, 5, size), dtype=np.uint8)
    for at in gguf_files.K_SCALES.get(kind, (0, 2) if kind.name.endswith("_1") else (0,)):
        raw[..., at : at + 2] = dice.normal(size=(6, 5, 1)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(6, -1)
    matrix = matrix_of(kind.name, torch.from_numpy(raw))
    assert np.array_equal(matrix.dequantized().numpy(), gguf.dequantize(raw, kind))
    assert matrix.bits == (4 if kind.name.startswith("Q4") else 8)


def test_blocks_of_large_matrices_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.randint(0, 255, (50, 144 * 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    whole = matrix_of("Q4_K", raw)
    monkeypatch.setattr("lineclear.worker.quantization.gguf._PIECE_BYTES", 144 * 2 * 7)
    pieces = matrix_of("Q4_K", raw)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.scale.nan_to_num(), pieces.scale.nan_to_num())


@pytest.mark.parametrize(("family", "kind"), CASES, ids=lambda x: getattr(x, "name", x))
def test_answers_are_those_of_transformers(family: str, kind: Type, tmp_path: Path) -> None:
    path = tmp_path / "tiny-model.gguf"
    model = gguf_files.write(path, family, kind)
    loaded = loaded_file(path)
    assert (loaded.model_id, loaded.family) == ("tiny-model", family)
    assert loaded.eos_token_ids == (1,)
    is_quantized = kind in BLOCKS
    assert loaded.weights == (f"gguf-{kind.name.lower()}" if is_quantized else "")
    assert isinstance(loaded.model.model.embed_tokens, QuantizedEmbedding) is is_quantized
    assert isinstance(loaded.model.model.layers[0].self_attn.o_proj, QuantizedLinear) is is_quantized
    expect_same_answers(loaded, model)


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in (Type.Q4_0, Type.Q4_K, Type.Q6_K, Type.Q8_0)),
        *(("mixtral", Type.Q4_K), ("qwen3_moe", Type.Q8_0)),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_fused_forward_pass_multiplies_the_stored_blocks(family: str, kind: Type, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = gguf_files.write(path, family, kind)
    fused = build_fused(loaded_file(path, None))
    assert fused is not None
    assert fused.decoder is not None
    with torch.inference_mode():
        assert relative_error(paged_logits(fused), eager_logits(model)) <= 0.15


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    path = tmp_path / "tied.gguf"
    model = gguf_files.write(path, "qwen3", Type.Q6_K, tie_word_embeddings=True)
    loaded = loaded_file(path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    expect_same_answers(loaded, model)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    path = tmp_path / "scaled.gguf"
    model = gguf_files.write(path, "llama", rope_parameters=rope)
    expect_same_answers(loaded_file(path), model)


def test_the_cache_has_one_directory_for_each_file(tmp_path: Path) -> None:
    """Those of changed, moved and removed files go, and what a killed process has left."""
    cache, (a, b) = tmp_path / "cache" / "lineclear" / "gguf", (tmp_path / "a.gguf", tmp_path / "b.gguf")
    gguf_files.write(a, "llama")
    gguf_files.write(b, "llama")
    old, kept = model_directory.locate(str(a)), model_directory.locate(str(b))
    assert model_directory.locate(str(a)) == old
    (unfinished := cache / ".new").mkdir()
    (killed := cache / ".old").mkdir()
    os.utime(killed, (0, 0))
    (cache / "stray").mkdir()
    gguf_files.write(a, "llama", num_hidden_layers=3)
    new = model_directory.locate(str(a))
    assert set(cache.iterdir()) == {new.parent, kept.parent, unfinished}
    b.rename(tmp_path / "c.gguf")
    moved = model_directory.locate(str(tmp_path / "c.gguf"))
    assert set(cache.iterdir()) == {new.parent, moved.parent, unfinished}


def test_dtype_is_that_of_the_file(tmp_path: Path) -> None:
    for kind, dtype in ((Type.F32, torch.float32), (Type.BF16, torch.bfloat16), (Type.Q4_0, torch.bfloat16)):
        gguf_files.write(tmp_path / "x.gguf", "llama", kind)
        assert loaded_file(tmp_path / "x.gguf", None).dtype is dtype


def test_factors_of_rope_divide_its_frequencies(tmp_path: Path) -> None:
    """As the converter writes them for Llama 3.1."""
    factors = [1.0] * 10 + [2.0, 3.0] + [8.0] * 20
    path = tmp_path / "llama3.gguf"
    model = gguf_files.write(path, "llama", rope_factors=factors)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / torch.tensor(factors)
    expect_same_answers(loaded_file(path), model)


def test_long_rope_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "phi3.gguf"
    gguf_files.write(path, "phi3", rope_long=([1.0] * 31 + [1.5], [2.0] * 32))
    rope = json.loads((model_directory.locate(str(path)) / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["short_factor"], rope["long_factor"]) == (
        "longrope",
        [1.0] * 31 + [1.5],
        [2.0] * 32,
    )
    assert loaded_file(path).max_model_len == 64  # the frequencies change behind it


SAMPLES = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces",
    "x=1\n\ty\r\n",
    "Zwölf Boxkämpfer",
    "いろは \U0001f600",
    "<think>a</think>b",
    "12345",
]


def converted(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory.locate(str(path)) / "tokenizer.json"))


def tokenizer_file(path: Path, tokenizer: Tokenizer, pre: str = "gpt-2") -> Path:
    model = gguf_files.tiny_model("llama", **gguf_files.SIZES | {"vocab_size": tokenizer.get_vocab_size() + 3})
    gguf_files.write_model(path, model, Type.F16, tokenizer, "{{ messages }}", pre)
    return path


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like"])
def test_tokens_are_those_of_the_original_tokenizer(kind: str, tmp_path: Path) -> None:
    original = small_tokenizers.KINDS[kind]()
    found = converted(tokenizer_file(tmp_path / "x.gguf", original))
    for text in [*SAMPLES, *small_tokenizers.TEXT[:5], "<s>[INST]hi[/INST]</s>"]:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == original.decode(ids), text
    special = {token.content for token in original.get_added_tokens_decoder().values() if token.special}
    assert {token.content for token in found.get_added_tokens_decoder().values() if token.special} == special


@pytest.mark.parametrize("pre", sorted(_SPLITS))
def test_known_expressions_can_be_used(pre: str, tmp_path: Path) -> None:
    found = converted(tokenizer_file(tmp_path / "x.gguf", small_tokenizers.byte_level(), pre))
    for text in SAMPLES:
        assert found.decode(found.encode(text).ids, skip_special_tokens=True) == text


def test_template_and_ends_of_an_answer(tmp_path: Path) -> None:
    directory = model_directory.locate(str(tokenizer_file(tmp_path / "x.gguf", small_tokenizers.byte_level())))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ messages }}"}
    assert json.loads((directory / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [1]}


def refusal(path: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        loaded_file(path)
    return str(caught.value)


def test_a_directory_with_one_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    gguf_files.write(tmp_path / "models" / "one.gguf", "llama")
    assert loaded_file(tmp_path / "models").model_id == "one"
    first = model_directory.locate(str(tmp_path / "models"))
    assert first == model_directory.locate(str(tmp_path / "models" / "one.gguf"))
    assert first.name == "one"
    (tmp_path / "models" / "two.gguf").write_bytes((tmp_path / "models" / "one.gguf").read_bytes())
    assert "holds 2 GGUF files (one.gguf and 1 more); give one of them, as --model" in refusal(tmp_path / "models")


def test_a_changed_file_has_another_directory(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    gguf_files.write(path, "llama")
    first = model_directory.locate(str(path))
    loaded = load(str(first), CPU, None)
    gguf_files.write(path, "llama", num_hidden_layers=1)
    assert "has changed since its directory was made; start the server again" in refusal(first)
    other = loaded_file(path)
    assert model_directory.locate(str(path)) != first
    assert other.weights_fingerprint != loaded.weights_fingerprint
    assert other.text_fingerprint == loaded.text_fingerprint


def test_copies_have_one_fingerprint(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "one.gguf", "llama", Type.Q8_0)
    (tmp_path / "two.gguf").write_bytes((tmp_path / "one.gguf").read_bytes())
    one, two = loaded_file(tmp_path / "one.gguf"), loaded_file(tmp_path / "two.gguf")
    assert (one.weights_fingerprint, one.text_fingerprint) == (two.weights_fingerprint, two.text_fingerprint)


def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    gguf_files.write(path, "llama")
    directory = model_directory.locate(str(path))
    directory.chmod(0o777)
    assert model_directory.locate(str(path)) != directory


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda writer: writer.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16), "llama-gguf-split --merge"),
        (
            lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)),
            "an unknown tensor of llama",
        ),
        (
            lambda writer: writer.add_tensor(
                "blk.0.x.weight", np.zeros((1, 98), np.uint8), raw_dtype=Type.IQ3_XXS, raw_shape=(1, 98)
            ),
            "blk.0.x.weight in the format IQ3_XXS; F32, F16, Q4_0",
        ),
    ],
)
def test_other_files_are_refused(change: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gguf_files._write_config
    monkeypatch.setattr(gguf_files, "_write_config", lambda writer, *rest: change(writer) or original(writer, *rest))
    gguf_files.write(tmp_path / "x.gguf", "llama")
    assert sentence in refusal(tmp_path / "x.gguf")


def test_other_architectures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_files.write(tmp_path / "x.gguf", "llama")
    data = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data.replace(b"llama", b"mamba", 1))
    assert "is of the architecture mamba; llama, qwen2" in refusal(tmp_path / "x.gguf")


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    gguf_files.write(path, "llama")
    data, head = path.read_bytes(), read_head(path)
    path.write_bytes(data[:-100])
    assert "is cut short: the tensor" in refusal(path)
    path.write_bytes(data[: min(tensor.start for tensor in head.tensors.values()) // 2])
    assert "is cut short within its header" in refusal(path)
    path.write_bytes(b"GGUF\3")
    assert "is cut short within its header" in refusal(path)


def test_heads_larger_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    gguf_files.write(path, "llama")
    whole, raw = read_head(path), path.read_bytes()
    for length in range(24, 4000, 97):
        with pytest.raises(gguf_file._MoreNeeded):
            gguf_file.parse_head(raw[:length], len(raw))
    assert gguf_file.parse_head(raw, len(raw)) == whole


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", ["llama"]),
        ("general.architecture", array("I", [1])),
        ("tokenizer.ggml.token_type", 5),
        ("tokenizer.ggml.token_type", 1.5),
    ],
)
def test_values_of_another_type_are_refused_or_left_out(key: str, value: Any, tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "x.gguf", "llama")
    head = read_head(tmp_path / "x.gguf")
    changed = replace(head, metadata={**head.metadata, key: value})
    if key == "general.architecture":
        with pytest.raises(GgufBroken, match="is of the architecture"):
            gguf_config.config_of(changed, lambda name: None)
    else:
        assert gguf_tokenizer.tokenizer_of(changed.metadata)[0]["model"]["vocab"]


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("llama", lambda writer: None, "RoPE requires an even"),
        ("gemma3_text", lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32)), "of RoPE for"),
    ],
)
def test_what_transformers_does_not_accept_is_refused(
    family: str, change: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that a loader does not expect would make the server start worker after worker."""
    write, path = gguf_files._write_config, tmp_path / "x.gguf"
    monkeypatch.setattr(gguf_files, "_write_config", lambda writer, *rest: change(writer) or write(writer, *rest))
    gguf_files.write(path, family, **({"num_hidden_layers": 3} if family == "gemma3_text" else {}))
    if family == "llama":  # a head of 63 features
        monkeypatch.setattr(gguf_config._Keys, "size", _with_odd_heads(gguf_config._Keys.size))
    assert sentence in refusal(path)


def _with_odd_heads(size: Any) -> Any:
    return lambda keys, name, *rest: 63 if name == "attention.key_length" else size(keys, name, *rest)


def test_scores_that_are_no_numbers_are_refused() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]}
    for scores in (["x", "y"], "ab", 2):
        with pytest.raises(GgufBroken, match="no score for each token"):
            gguf_tokenizer.tokenizer_of({**metadata, "tokenizer.ggml.scores": scores})


def test_more_layers_than_tensors_take_no_memory(tmp_path: Path) -> None:
    """The name of one tensor could make a model of 2^31 layers."""
    gguf_files.write(tmp_path / "x.gguf", "gemma3_text", num_hidden_layers=3)
    head, count = read_head(tmp_path / "x.gguf"), (1 << 31) - 1
    tensors = {**head.tensors, f"blk.{count - 1}.attn_norm.weight": head.tensors["blk.0.attn_norm.weight"]}
    changed = replace(head, tensors=tensors, metadata={**head.metadata, "gemma3.block_count": count})
    with pytest.raises(GgufBroken, match=f"says that it has {count} layers"):
        gguf_config.config_of(changed, lambda name: None)


def test_tensors_with_the_same_bytes_are_refused(tmp_path: Path) -> None:
    """A small file could else fill the memory with copies of one tensor."""
    gguf_files.write(tmp_path / "x.gguf", "llama")
    raw, head = (tmp_path / "x.gguf").read_bytes(), read_head(tmp_path / "x.gguf")
    first = min(tensor.start for tensor in head.tensors.values())
    largest = max(head.tensors.values(), key=lambda x: x.size)
    descriptions = [(name, [*reversed(largest.shape)], 0, 0) for name in head.tensors]
    with pytest.raises(GgufBroken, match=r"tensors of .* bytes, more than it has"):
        gguf_file._placed(descriptions, head.metadata, first, len(raw))


@pytest.mark.parametrize("index", [0, 7])
def test_repeated_tokens_get_names_that_no_other_has(index: int) -> None:
    """A file can have the name that a repeated token would get, and the name that this would get."""
    name = "x"
    for _ in range(9):
        name = f"[duplicate {index + 10} of {name[:40]}]"
    tokens = [*"abcdefgh", name, *"ijklmnop"[: index + 1], *[name] * 4]
    found = gguf_tokenizer._distinct(tokens)
    assert len(set(found)) == len(tokens)
    assert gguf_tokenizer._distinct(["a", "a"]) == ["a", "[duplicate 1 of a]"]


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    found = model_files.gguf_files(300, seed=1, directory=tmp_path)
    assert found["refused"] > 150
    assert found["read"] > 20
