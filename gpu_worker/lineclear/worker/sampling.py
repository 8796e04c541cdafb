"""From logits to tokens: a pure function of (logits, parameters, noise), for all sampling rows of a step at once.

The order: bias, penalties, allowed and banned ids; the log-probabilities that are reported; temperature; top_k, top_p,
min_p; the draw. Meaning and order are those of transformers' logits processors. What truncation keeps is described by
one number a row, the smallest probability that stays, so no order among equals and no neighbour can matter: tokens that
tie with the last one kept are kept. Draws go through the tokens in the order of their ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .parameters import Draws, Penalties, SamplingRows, TruncatedDraws

_FIRST_CANDIDATES = 256
_SMALL_VOCABULARY = 4096
_PICK_WIDTH = 512
_BEST_WIDTH = 128


class Sampled(NamedTuple):
    """What came out, on the device."""

    tokens: Tensor
    """[num_rows] int64; 0 in bad rows."""
    bad: Tensor
    """[num_rows] bool: the logits were not finite, or nothing was allowed."""
    logprobs: Tensor | None = None
    """[num asked]: of the sampled token, in the order of `logprob_rows`."""
    top_ids: Tensor | None = None
    """[num asked, most asked]: the most likely first, the lowest id first among equals."""
    top_logprobs: Tensor | None = None


def sample(logits: Tensor, rows: SamplingRows, token_table: Tensor) -> Sampled:
    """One token for each row of `logits` [num_rows, vocabulary], which may be overwritten.

    `token_table` [num_slots, positions] holds what the penalised sequences have said so far.
    """
    best, tokens = _best(logits)
    # Models may put -inf on ids they never say, so a row is bad when its best is not finite, not when any is not.
    bad = ~torch.isfinite(best)
    if rows.is_greedy:
        return Sampled(tokens.masked_fill_(bad, 0), bad)
    logits = logits.float()
    if rows.changes_logits:
        logits = _change(logits, rows, token_table)
        best, tokens = _best(logits)
        bad |= ~torch.isfinite(best)
    if rows.draws is not None:
        tokens[rows.draws.rows] = _draw(logits, rows.draws)
    if rows.truncated_draws is not None:
        tokens[rows.truncated_draws.rows] = _draw_truncated(logits, rows.truncated_draws)
    tokens.masked_fill_(bad, 0)
    if rows.logprob_rows is None:
        return Sampled(tokens, bad)
    return Sampled(tokens, bad, *_logprobs(logits, tokens, rows.logprob_rows, max(rows.num_top)))


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] highest logit and its id: NaN wins a maximum, and the lowest id wins a tie.

    Maxima of pieces first: without an index to carry they are several times as fast.
    """
    count, vocabulary = logits.shape
    if vocabulary % _BEST_WIDTH:
        best, ids = logits.max(dim=-1)
        return best, ids
    pieces = logits.view(count, -1, _BEST_WIDTH)
    piece = pieces.amax(dim=-1).max(dim=-1).indices
    best, inside = pieces[torch.arange(count, device=logits.device), piece].max(dim=-1)
    return best, piece * _BEST_WIDTH + inside


# --- changing logits -----------------------------------------------------------------------------------------------


def _change(logits: Tensor, rows: SamplingRows, token_table: Tensor) -> Tensor:
    if rows.bias is not None and rows.bias_values is not None:
        logits.index_put_((rows.bias.rows, rows.bias.ids), rows.bias_values, accumulate=True)
    if rows.penalties is not None:
        logits[rows.penalties.rows] = _penalise(logits[rows.penalties.rows], rows.penalties, token_table)
    if rows.allowed is not None and rows.allowed_rows is not None:
        kept = logits[rows.allowed.rows, rows.allowed.ids]
        logits[rows.allowed_rows] = float("-inf")
        logits[rows.allowed.rows, rows.allowed.ids] = kept
    if rows.banned is not None:
        minus_infinity = torch.full((), float("-inf"), device=logits.device)
        logits.index_put_((rows.banned.rows, rows.banned.ids), minus_infinity)
    return logits


def _penalise(logits: Tensor, penalties: Penalties, token_table: Tensor) -> Tensor:
    """Penalties from the tokens themselves, so that a preempted or restarted sequence is penalised as before."""
    history = token_table[penalties.slots, : penalties.max_length]
    places = torch.arange(penalties.max_length, device=logits.device)
    # A sequence shorter than the longest is padded with its own first token, which is one that is penalised anyway.
    said = torch.where(places < penalties.lengths, history, history[:, :1])
    score = logits.gather(1, said)
    score = torch.where(score < 0, score * penalties.repetition, score / penalties.repetition)
    logits = logits.scatter(1, said, score)

    in_output = (places >= penalties.prompt_lens) & (places < penalties.lengths)
    counts = torch.zeros_like(logits).scatter_add_(1, said, in_output.to(logits.dtype))
    return logits - penalties.frequency * counts - penalties.presence * (counts > 0)


# --- drawing -------------------------------------------------------------------------------------------------------


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    """Inverse transform sampling from the whole distribution, one noise number a row."""
    return _pick(_probabilities(logits, draws), draws.noise)


def _draw_truncated(logits: Tensor, draws: TruncatedDraws) -> Tensor:
    """Inverse transform sampling from the distribution that top_k, top_p and min_p leave."""
    weights, ids = _kept(_probabilities(logits, draws), draws)
    # In double precision, in which the zeros between the kept tokens change nothing: how many candidates there are, and
    # so the neighbours that made it that many, does not matter.
    running = weights.cumsum(dim=-1, dtype=_wide(weights))
    return ids.gather(1, _first_above(running, draws.noise * running[:, -1:]))[:, 0]


def _probabilities(logits: Tensor, draws: Draws) -> Tensor:
    return torch.softmax(logits[draws.rows].div_(draws.temperature), dim=-1)


def _kept(probabilities: Tensor, draws: TruncatedDraws) -> tuple[Tensor, Tensor]:
    """Candidates in the order of their ids: weights (0 for what was cut) and ids, both [rows, num_candidates]."""
    vocabulary = probabilities.shape[-1]
    # A full sort costs more than everything else on a CPU, and few candidates are nearly always enough. On other
    # devices the question whether they were would make the host wait.
    on_cpu = probabilities.device.type == "cpu"
    few = on_cpu and vocabulary > _SMALL_VOCABULARY
    count = min(vocabulary, max(_FIRST_CANDIDATES, draws.max_top_k)) if few else vocabulary
    while True:
        values, ids = probabilities.topk(count, dim=-1)
        cut = _cut(values, draws)
        least = values[:, -1:]
        # Nothing beyond the candidates can be kept when even the last of them is not.
        if count == vocabulary or bool(((least < cut) | (least == 0)).all()):
            break
        count = min(vocabulary, count * 8)
    ids, order = ids.sort(dim=-1)
    values = values.gather(1, order)
    return torch.where(values >= cut, values, 0.0), ids


def _cut(candidates: Tensor, draws: TruncatedDraws) -> Tensor:
    """[rows, 1]: the probability of the least likely token that stays, from the most likely ones in falling order."""
    count = candidates.shape[-1]
    last = torch.where(draws.top_k > 0, draws.top_k, count).clamp(max=count) - 1
    kept = candidates >= candidates.gather(1, last)
    mass = torch.where(kept, candidates, 0.0).to(_wide(candidates))
    before = mass.cumsum(dim=-1) - mass
    total = torch.where(draws.top_k > 0, mass.sum(dim=-1, keepdim=True), 1.0)
    kept &= (before < draws.top_p * total) | (draws.top_p >= 1)
    kept &= candidates >= draws.min_p * candidates[:, :1]
    kept[:, 0] = True  # rounding must not leave nothing
    return torch.where(kept, candidates, float("inf")).amin(dim=-1, keepdim=True)


def _pick(weights: Tensor, noise: Tensor) -> Tensor:
    """The index at which the running sum of each row's weights passes noise * sum; never one of weight 0.

    In two steps, over sums of a few hundred entries and then inside one of them: a running sum over a whole vocabulary
    in double precision would cost more than the softmax. Each row is summed in the same order whatever its neighbours.
    """
    padding = -weights.shape[-1] % _PICK_WIDTH
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    pieces = weights.view(len(weights), -1, _PICK_WIDTH)
    sums = pieces.sum(dim=-1).to(_wide(weights))
    running = sums.cumsum(dim=-1)
    target = noise * running[:, -1:]
    piece = _first_above(running, target)
    inside = pieces[torch.arange(len(weights), device=weights.device), piece[:, 0]].cumsum(dim=-1, dtype=_wide(weights))
    target = target - (running - sums).gather(1, piece)
    return (piece * _PICK_WIDTH + _first_above(inside, target))[:, 0]


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """[rows, 1]: the first index whose running sum exceeds the target, at most the last one that added anything."""
    last = (running < running[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((running <= target).sum(dim=-1, keepdim=True), last)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


# --- reporting -----------------------------------------------------------------------------------------------------


def _logprobs(logits: Tensor, tokens: Tensor, rows: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural logarithms before temperature and truncation."""
    all_logprobs = torch.log_softmax(logits[rows], dim=-1)
    chosen = all_logprobs.gather(1, tokens[rows][:, None])[:, 0]
    values, ids = all_logprobs.topk(min(most, all_logprobs.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return chosen, ids.gather(1, order), values
