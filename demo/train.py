"""Trains the demo model on a CPU and writes it as a Hugging Face directory.

    python demo/train.py --out demo/model
    python demo/train.py --out demo/model-tiny --size tiny --tokenizer demo/model
    python demo/train.py --out demo/model --resume demo/model --steps 600    # continue training

Holds the tokenizer, packing, the training loop and the model card. `corpus.py` makes the documents.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Document, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

HERE = Path(__file__).parent

VOCAB_SIZE = 4096
CONTEXT_LEN = 1024
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

TRAINING_SEED, CHECK_SEED, TOKENIZER_SEED = 1, 2, 3
NUM_TOKENIZER_DOCUMENTS = 20_000
TOKENS_PER_STEP = 1024
# Short rows cost less attention. The last quarter of the steps uses whole contexts, to train late positions.
SHORT_ROW_LEN, SHORT_SHARE = 512, 0.75


@dataclass(frozen=True)
class Size:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_steps: int
    peak_learning_rate: float


SIZES = {
    "small": Size(256, 704, 4, 8, 4, num_steps=2600, peak_learning_rate=2e-3),
    "tiny": Size(80, 224, 2, 4, 2, num_steps=2500, peak_learning_rate=5e-3),
}
HEAD_DIM = 32


def main() -> None:
    arguments = _arguments()
    size = SIZES[arguments.size]
    num_steps = arguments.steps or size.num_steps
    set_seed(TRAINING_SEED)

    known = arguments.resume or arguments.tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(known) if known else train_tokenizer()
    if arguments.resume:
        model = LlamaForCausalLM.from_pretrained(arguments.resume, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(_config(size, tokenizer))
    print(f"{arguments.size}: {model.num_parameters():,} parameters, {num_steps} steps", flush=True)

    started_seconds = time.monotonic()
    # A smaller learning rate for weights that are already trained.
    peak_rate = size.peak_learning_rate * (0.4 if arguments.resume else 1.0)
    loss = train(model, tokenizer, num_steps, peak_rate, seed=TRAINING_SEED + (num_steps if arguments.resume else 0))
    minutes = (time.monotonic() - started_seconds) / 60
    print(f"done in {minutes:.1f} minutes, loss {loss:.3f}", flush=True)
    save(model, tokenizer, arguments.out, _model_card(arguments.size, model, num_steps, minutes, loss))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="directory to write")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="fewer or more steps than this size usually takes")
    parser.add_argument("--tokenizer", type=Path, help="share the tokenizer of this model instead of training one")
    parser.add_argument("--resume", type=Path, help="go on from the weights and the tokenizer of this model")
    return parser.parse_args()


# ---- tokenizer


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a sample of the corpus; every size gets the same one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        # All 256 bytes have a token, so every text can be encoded and decoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(documents(TOKENIZER_SEED), NUM_TOKENIZER_DOCUMENTS)
    bpe.train_from_iterator((_plain(document) for document in sample), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=(HERE / "chat_template.jinja").read_text(encoding="utf-8").strip(),
    )


def _plain(document: Document) -> str:
    return document if isinstance(document, str) else " ".join(message["content"] for message in document)


# ---- rows of tokens


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Return the document as in use: start and end tokens around text, the chat template around messages."""
    if isinstance(document, str):
        text = f"{BOS}{document}{EOS}"
    else:
        text = str(tokenizer.apply_chat_template(list(document), tokenize=False))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def rows(tokenizer: PreTrainedTokenizerFast, seed: int, row_len: int) -> Iterator[list[int]]:
    """Yield rows of exactly `row_len` tokens, endlessly.

    Each row starts with a new document, because that is how a prompt starts. What does not fit is thrown away: the
    corpus is endless, so nothing is lost.
    """
    row: list[int] = []
    for document in documents(seed):
        row += encode(tokenizer, document)
        if len(row) >= row_len:
            yield row[:row_len]
            row = []


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int, row_len: int) -> Iterator[torch.Tensor]:
    source = rows(tokenizer, seed, row_len)
    while True:
        yield torch.tensor(list(itertools.islice(source, TOKENS_PER_STEP // row_len)))  # [num_rows, row_len]


# ---- training


def _config(size: Size, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT_LEN,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int, peak_rate: float, seed: int
) -> float:
    """Train for `num_steps` in float32 and return the loss on documents from another seed, in nats per token."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    num_short_steps = round(num_steps * SHORT_SHARE)
    batches = itertools.chain(
        itertools.islice(_batches(tokenizer, seed, SHORT_ROW_LEN), num_short_steps),
        _batches(tokenizer, seed + 100_000, CONTEXT_LEN),
    )
    started_seconds = time.monotonic()
    model.train()
    for step, batch in zip(range(1, num_steps + 1), batches, strict=False):
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            rate = step * TOKENS_PER_STEP / (time.monotonic() - started_seconds)
            print(f"step {step}/{num_steps}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)
    model.eval()
    return check_loss(model, tokenizer)


def _rate(step: int, num_steps: int) -> float:
    """Warm up over 100 steps or a tenth of all, then follow a cosine down to a fiftieth."""
    progress = step / num_steps
    return min(1.0, (step + 1) / min(100, num_steps / 10)) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def _loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch, use_cache=False).logits  # [num_rows, row_len, vocab], fp32
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE), batch[:, 1:].reshape(-1))


@torch.no_grad()
def check_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_batches: int = 10) -> float:
    batches = itertools.islice(_batches(tokenizer, CHECK_SEED, CONTEXT_LEN), num_batches)
    return sum(_loss(model, batch).item() for batch in batches) / num_batches


# ---- writing


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, card: str) -> None:
    """Write the directory; weights are rounded to bfloat16, which halves them and costs next to no quality."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    # safetensors writes a file that only its owner can read; a server often runs as another user.
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card, encoding="utf-8")


def _model_card(size: str, model: LlamaForCausalLM, num_steps: int, minutes: float, loss: float) -> str:
    card = (HERE / "model_card.md").read_text(encoding="utf-8")
    return card.format(
        size=size,
        num_parameters=f"{model.num_parameters():,}",
        num_layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        num_heads=model.config.num_attention_heads,
        num_kv_heads=model.config.num_key_value_heads,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        context_len=CONTEXT_LEN,
        num_tokens=f"{num_steps * TOKENS_PER_STEP / 1e6:.1f}",
        num_steps=num_steps,
        minutes=f"{minutes:.0f}",
        loss=f"{loss:.2f}",
    )


if __name__ == "__main__":
    main()
