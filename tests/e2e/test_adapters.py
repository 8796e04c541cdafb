"""Adapters of the whole service with real processes and the demo model, compared with PEFT."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

from e2e.killed_worker import answers_over_a_kill
from support.adapters import peft_answer, save_adapter
from support.demo import PROMPTS, model
from support.service import running

MAX_TOKENS = 60


def test_streams_with_adapters_equal_peft_over_worker_kills(tmp_path: Path) -> None:
    loaded, tokenizer = model()
    make_model = partial(copy.deepcopy, loaded)
    folders = {name: save_adapter(make_model(), tmp_path / name, seed) for seed, name in enumerate("ab")}
    asked = [(tokenizer(prompt)["input_ids"], name) for prompt, name in zip(PROMPTS[:3], (None, "a", "b"), strict=True)]
    expected = [peft_answer(make_model, folders[name] if name else None, ids, MAX_TOKENS) for ids, name in asked]
    assert peft_answer(make_model, None, asked[1][0], MAX_TOKENS) != expected[1], "the adapter changes the answer"
    modules = ",".join(f"{name}={path}" for name, path in folders.items())
    with running("--lora-modules", modules) as service:
        params = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        found = answers_over_a_kill(service, [(ids, {"adapter": name, **params}) for ids, name in asked])
        assert [list(answer.token_ids) for answer in found] == expected
