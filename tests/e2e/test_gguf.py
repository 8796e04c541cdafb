"""A GGUF file of the demo model, served by both processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support import gguf_files
from support.demo import PROMPTS, model
from support.service import DEMO_MODEL, running
from support.time_limits import PATIENCE_SECONDS
from tokenizers import Tokenizer

from lineclear.client import rpc_methods
from lineclear.v1 import inference_pb2 as pb

MAX_TOKENS = 40


def greedy(reference: Any, ids: list[int]) -> list[int]:
    lengths = {"max_new_tokens": MAX_TOKENS, "min_new_tokens": MAX_TOKENS}  # bans the end of the answer
    output = reference.generate(torch.tensor([ids]), do_sample=False, **lengths)
    return output[0, len(ids) :].tolist()


def test_answers_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as text and as a conversation: tokenizer, special tokens and template are those of the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original, tokenizer = model()
    reference = type(original)(original.config)
    reference.load_state_dict(original.state_dict())
    reference.generation_config = original.generation_config
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    path, library = tmp_path / "demo-q8.gguf", Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    gguf_files.write_model(path, reference.eval(), Type.Q8_0, library, template, "smollm")
    assert not torch.equal(reference.model.layers[0].mlp.up_proj.weight, original.model.layers[0].mlp.up_proj.weight)
    conversation = [{"role": "user", "content": "What is the capital of Peru?"}]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    with running(model=path) as service:
        served = service.client._unary(rpc_methods.GET_MODEL, pb.GetModelRequest(), PATIENCE_SECONDS)
        assert (served.model_id, served.dtype) == ("demo-q8", "gguf-q8_0")
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "banned_token_ids": [2]}
        prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:3]]
        expected = [greedy(reference, prompt) for prompt in prompts]
        assert [list(service.client.generate(prompt, **params).token_ids) for prompt in prompts] == expected
        assert list(service.client.generate(PROMPTS[0], **params).token_ids) == expected[0]
        answer = service.client.generate(conversation, **params)
        assert list(answer.token_ids) == greedy(reference, ids)
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert os.listdir(tmp_path / "cache" / "lineclear" / "gguf")
