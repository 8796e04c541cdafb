"""Adapters of the whole service with real processes and the demo model, compared with PEFT."""

from __future__ import annotations

import copy
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.adapters import peft_answer, save_adapter
from support.demo import PROMPTS, model
from support.service import Service, running, wait_for

MAX_TOKENS = 40


def test_streams_with_adapters_equal_peft_over_worker_kills(tmp_path: Path) -> None:
    loaded, tokenizer = model()
    folders = [save_adapter(copy.deepcopy(loaded), tmp_path / name, seed) for seed, name in enumerate("ab")]
    names = {None: None, folders[0]: "a", folders[1]: "b"}
    chosen = [list(names)[i % 3] for i in range(9)]
    prompts = [tokenizer(PROMPTS[i % len(PROMPTS)])["input_ids"] for i in range(9)]
    expected = [
        peft_answer(lambda: copy.deepcopy(loaded), path, prompt, MAX_TOKENS)
        for path, prompt in zip(chosen, prompts, strict=True)
    ]
    assert expected[0] != expected[1] or prompts[0] != prompts[1]
    modules = ",".join(f"{name}={path}" for path, name in names.items() if path is not None)
    with running("--lora-modules", modules, worker=("--dtype", "float32")) as service:
        found, kills = _answers(service, [names[path] for path in chosen], prompts)
        assert found == expected
        assert kills == 2


def _answers(service: Service, names: list[str | None], prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Return the answers to all prompts at once, while the worker is killed twice."""

    def read(entry: tuple[str | None, list[int]]) -> list[int]:
        name, prompt = entry
        answer = service.client.generate(prompt, adapter=name, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        return list(answer.token_ids)

    kills = 0
    with ThreadPoolExecutor(len(names)) as pool:
        answers = pool.map(read, zip(names, prompts, strict=True))
        for number in range(2):
            wait_for(lambda: service.client.stats().counters.generation_tokens > 20 * (number + 1), "tokens")  # noqa: B023
            os.kill(service.worker_pid, signal.SIGKILL)
            kills += 1
        return list(answers), kills
