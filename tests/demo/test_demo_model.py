"""The shipped demo model: its files and its greedy answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the demonstration model is run as it is published")
transformers = pytest.importorskip("transformers", reason="as torch")

DEMO = Path(__file__).parents[2] / "demo"
MODEL = DEMO / "model"

EXPECTED_FILES = {
    *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True).eval()


def _continue(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> list[int]:
    return _generate(model, tokenizer(prompt, return_tensors="pt").input_ids, max_new_tokens)


def _answer(model: Any, tokenizer: Any, question: str, max_new_tokens: int) -> list[int]:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    return _generate(model, ids, max_new_tokens)


def _generate(model: Any, ids: Any, max_new_tokens: int) -> list[int]:
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    new_ids: list[int] = out[0, ids.shape[1] :].tolist()
    return new_ids


def _distinct_share(ids: list[int], length: int = 4) -> float:
    grams = [tuple(ids[at : at + length]) for at in range(len(ids) - length + 1)]
    return len(set(grams)) / len(grams)


def test_directory_is_small_and_plain() -> None:
    assert {path.name for path in MODEL.iterdir()} == EXPECTED_FILES
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 16_000_000


@pytest.mark.parametrize(
    ("prompt", "count", "subject"),
    [
        ("Today's weather is so", 50, ("sun", "sky", "rain", "wind")),
        ("In machine learning, a transformer is", 300, ("token", "attention", "layer")),
        ("Once upon a time in a land far away,", 30, ("named", "called", "lived")),
        ("Quantum computing differs from classical computing because", 180, ("qubit", "classical")),
        ("The history of the Roman Empire began", 45, ("Rom", "city", "emperor")),
    ],
)
def test_long_continuations_do_not_loop(
    model: Any, tokenizer: Any, prompt: str, count: int, subject: tuple[str, ...]
) -> None:
    ids = _continue(model, tokenizer, prompt, count)
    assert len(ids) == count
    assert tokenizer.eos_token_id not in ids
    assert _distinct_share(ids) > 0.8
    assert any(word in tokenizer.decode(ids) for word in subject)


@pytest.mark.parametrize(
    ("question", "max_new_tokens", "expected"),
    [
        ("What is the capital of Japan?", 20, "Tokyo"),
        ("What is the capital of Kenya?", 20, "Nairobi"),
        ("Hello, how are you?", 40, "I am fine"),
        ("Thank you", 20, "welcome"),
        ("Tell me a story about a fox", 320, "little fox"),
    ],
)
def test_answers_end(model: Any, tokenizer: Any, question: str, max_new_tokens: int, expected: str) -> None:
    ids = _answer(model, tokenizer, question, max_new_tokens)
    assert ids[-1] == tokenizer.eos_token_id
    assert expected in tokenizer.decode(ids)


def test_tiny_model_shares_the_tokenizer(tokenizer: Any) -> None:
    tiny = DEMO / "model-tiny"
    assert {path.name for path in tiny.iterdir()} == EXPECTED_FILES
    assert sum(path.stat().st_size for path in tiny.iterdir()) < 2_000_000
    other = transformers.AutoTokenizer.from_pretrained(tiny, local_files_only=True)
    assert other.get_vocab() == tokenizer.get_vocab()
    small = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, local_files_only=True).eval()
    assert " the " in other.decode(_continue(small, other, "Once upon a time", 40))


def test_chat_template_marks_every_message(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
