"""All changes of logits before the log-probabilities and the draw, in their one order.

Sums first, masks last, so that no later change lifts a mask: bias; penalties for tokens of the context; DRY; the
growing weight of the end; repeated n-grams and bad words; allowed ids; banned ids; the forced first token.

Every change is a function of a row's slot and position and of the tokens before that position in the token table. So
preemption, a worker loss and a resumed answer change no token, and several positions of a slot may be rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lineclear.wire.sampling import Use

from .dry import penalize_repetition
from .sampling_metadata import Context, Entries, SamplingMetadata
from .token_history import ban_bad_words, ban_ngrams, penalize


def change_logits(logits: Tensor, metadata: SamplingMetadata, token_table: Tensor) -> Tensor:
    """Return float32 `logits` [num_rows, vocabulary], changed in place.

    `token_table` [num_slots, positions] holds the tokens of every sequence.
    """
    if metadata.bias is not None and metadata.bias_values is not None:
        logits.index_put_((metadata.bias.rows, metadata.bias.ids), metadata.bias_values, accumulate=True)
    _change_by_context(logits, metadata.contexts.get(Use.PENALTY), penalize, token_table)
    dry, breakers = metadata.contexts.get(Use.DRY), metadata.breakers
    if dry is not None and breakers is not None:
        logits[dry.rows] = penalize_repetition(logits[dry.rows], dry, breakers, token_table)
    if metadata.decay is not None and metadata.decay_factors is not None:
        _raise_ends(logits, metadata.decay, metadata.decay_factors)
    _change_by_context(logits, metadata.contexts.get(Use.NGRAM), ban_ngrams, token_table)
    if metadata.bad_words is not None:
        ban_bad_words(logits, metadata.bad_words, token_table)
    allowed = metadata.allowed
    if allowed is not None and metadata.allowed_rows is not None:
        kept = logits[allowed.rows, allowed.ids]
        logits[metadata.allowed_rows] = float("-inf")
        logits[allowed.rows, allowed.ids] = kept
    if metadata.banned is not None:
        _fill(logits, metadata.banned, float("-inf"))
    if metadata.forced is not None:
        logits[metadata.forced.rows] = float("-inf")
        _fill(logits, metadata.forced, 0.0)
    return logits


def _change_by_context(
    logits: Tensor, context: Context | None, change: Callable[[Tensor, Context, Tensor], Tensor], token_table: Tensor
) -> None:
    if context is not None:
        logits[context.rows] = change(logits[context.rows], context, token_table)


def _raise_ends(logits: Tensor, ends: Entries, factors: Tensor) -> None:
    """Raise each end token's logit by its size times factor - 1 (transformers' exponential decay length penalty)."""
    scores = logits[ends.rows, ends.ids]
    sizes = scores.abs().masked_fill_(scores.isinf(), 0.0)  # ids that the model never produces stay at -inf
    logits[ends.rows, ends.ids] = scores + sizes * (factors - 1)


def _fill(logits: Tensor, entries: Entries, value: float) -> None:
    logits.index_put_((entries.rows, entries.ids), torch.full((), value, device=logits.device))
