"""The bundled demo model, loaded from its files as a worker loads it, says what transformers' `generate` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from support.inprocess import InProcess

from lineclear.scheduler.scheduling.core import CoreLimits
from lineclear.scheduler.scheduling.sequence import Request
from lineclear.wire.types import Sampling
from lineclear.worker.loader import load
from lineclear.worker.model import LoadedModel
from lineclear.worker.runner import ModelRunner

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXTS = ["Once upon a time", "The signal", "A train", "There was a small station at the end of the line. Every morning"]


@pytest.fixture(scope="module", name="loaded")
def load_demo() -> LoadedModel:
    return load(str(DEMO), torch.device("cpu"), torch.float32)


def requests(sampling: Sampling, eos: frozenset[int]) -> list[Request]:
    tokenizer = tf.AutoTokenizer.from_pretrained(DEMO)
    return [Request(text, tuple(tokenizer(text).input_ids), sampling, 48, eos_ids=eos) for text in TEXTS]


@pytest.mark.parametrize("limits", [CoreLimits(), CoreLimits(target_batch_tokens=5)], ids=["whole", "chunked"])
def test_greedy_answers_are_transformers(loaded: LoadedModel, limits: CoreLimits) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    eos = frozenset(loaded.eos_token_ids)
    asked = requests(Sampling(stop_ids=tuple(sorted(eos))), eos)
    found = InProcess(ModelRunner(loaded, num_blocks=64), limits).serve(asked)
    for request in asked:
        ids = torch.tensor([request.prompt])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, eos_token_id=sorted(eos)
        )
        assert found[request.request_id] == wanted[0, ids.shape[1] :].tolist()


def test_a_seed_gives_one_answer_in_company_and_alone(loaded: LoadedModel) -> None:
    asked = requests(Sampling(temperature=0.8, top_p=0.9, seed=11), frozenset())
    server = InProcess(ModelRunner(loaded, num_blocks=64))
    together = server.serve(asked)
    for request in asked:
        alone = InProcess(ModelRunner(loaded, num_blocks=64)).serve([request])
        assert alone[request.request_id] == together[request.request_id]
