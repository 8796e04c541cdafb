"""From logits to tokens: a pure function of (logits, parameters, noise), for all sampling rows of a step at once.

The order: bias, penalties, allowed and banned ids; the log-probabilities that are reported; temperature; top_k, top_p,
min_p; the draw. Meaning and order are those of transformers' logits processors. What truncation keeps is described by
one number a row, the smallest probability that stays, so no order among equals and no neighbour can matter: tokens that
tie with the last one kept are kept. Draws go through the tokens in the order of their ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .logits import Logits, of
from .sampling_metadata import Draws, Penalties, SamplingRows, TruncatedDraws

_CANDIDATES = 256
_SMALL_VOCABULARY = 4096
_PICK_WIDTH = 512


class Sampled(NamedTuple):
    """What came out, on the device."""

    tokens: Tensor
    """[num_rows] int64; 0 in bad rows."""
    bad: Tensor | None
    """[num_rows] bool: the logits were not finite, or nothing was allowed. None: no row is."""
    logprobs: Tensor | None = None
    """[num asked]: of the sampled token, in the order of `logprob_rows`."""
    top_ids: Tensor | None = None
    """[num asked, most asked]: the most likely first, the lowest id first among equals."""
    top_logprobs: Tensor | None = None
    host_tokens: list[int] | None = None
    """`tokens`, where the host has them already."""


def sample(model: Logits, rows: SamplingRows, token_table: Tensor) -> Sampled:
    """One token for each row of what the model said, which may be overwritten, and in whose memory the tokens may lie.

    `token_table` [num_slots, positions] holds what the penalised sequences have said so far.
    """
    if model.host_best is not None and rows.is_greedy and all(map(math.isfinite, model.host_best[0])):
        return Sampled(model.ids, None, host_tokens=model.host_best[1])
    return _sample(model, rows, token_table)


@torch.inference_mode()
def _sample(model: Logits, rows: SamplingRows, token_table: Tensor) -> Sampled:
    logits, best, tokens, _ = model
    # Models may put -inf on ids they never say, so a row is bad when its best is not finite, not when any is not.
    bad = ~torch.isfinite(best)
    if rows.is_greedy:
        return Sampled(tokens.masked_fill_(bad, 0), bad)
    logits = logits.float()
    if rows.changes_logits:
        logits, best, tokens, _ = of(_change(logits, rows, token_table))
        bad |= ~torch.isfinite(best)
    if rows.draws is not None:
        tokens[rows.draws.rows] = _draw(logits, rows.draws)
    if rows.truncated_draws is not None:
        tokens[rows.truncated_draws.rows] = _draw_truncated(logits, rows.truncated_draws)
    tokens.masked_fill_(bad, 0)
    if rows.logprob_rows is None:
        return Sampled(tokens, bad)
    return Sampled(tokens, bad, *_logprobs(logits, tokens, rows.logprob_rows, max(rows.num_top)))


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
    probabilities = _probabilities(logits, draws)
    smallest = torch.maximum(_cut(probabilities, draws), draws.min_p * probabilities.amax(dim=-1, keepdim=True))
    return _pick(probabilities.mul_(probabilities >= smallest), draws.noise)


def _probabilities(logits: Tensor, draws: Draws) -> Tensor:
    return torch.softmax(logits[draws.rows].div_(draws.temperature), dim=-1)


def _cut(probabilities: Tensor, draws: TruncatedDraws) -> Tensor:
    """[rows, 1]: the probability of the least likely token that top_k, and then top_p, keep.

    On a CPU a sort costs more than everything else, and a few hundred candidates are nearly always enough; a row for
    which they are not (a flat distribution, a large top_k) is counted out instead. On other devices the question would
    make the host wait, and sorting is cheap.
    """
    vocabulary = probabilities.shape[-1]
    few = probabilities.device.type == "cpu" and vocabulary > _SMALL_VOCABULARY
    candidates = probabilities.topk(_CANDIDATES if few else vocabulary, dim=-1).values
    cut = _cut_of_sorted(candidates, draws.top_k, draws.top_p)
    if few:
        least = candidates[:, -1:]
        unknown = ((least >= cut) & (least > 0)) | (draws.top_k > _CANDIDATES)
        for row in unknown[:, 0].nonzero()[:, 0].tolist():
            cut[row] = _cut_by_counting(probabilities[row], int(draws.top_k[row]), float(draws.top_p[row]))
    return cut


def _cut_of_sorted(candidates: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As `_cut`, from the most likely tokens in falling order."""
    count = candidates.shape[-1]
    last = torch.where(top_k > 0, top_k, count).clamp(max=count) - 1
    kept = candidates >= candidates.gather(1, last)
    mass = torch.where(kept, candidates, 0.0).to(_wide(candidates))
    before = mass.cumsum(dim=-1) - mass
    total = torch.where(top_k > 0, mass.sum(dim=-1, keepdim=True), 1.0)
    kept &= (before < top_p * total) | (top_p >= 1)
    kept[:, 0] = True  # rounding must not leave nothing
    return torch.where(kept, candidates, float("inf")).amin(dim=-1, keepdim=True)


def _cut_by_counting(probabilities: Tensor, top_k: int, top_p: float) -> float:
    """As `_cut`, for one row [vocabulary], without sorting."""
    mass = probabilities.double()
    kth, total = 0.0, 1.0
    if top_k > 0:
        kth = _reaching(probabilities, torch.ones_like(mass), top_k)
        mass.mul_(probabilities >= kth)
        total = float(mass.sum())
    return max(kth, _reaching(probabilities, mass, top_p * total)) if top_p < 1 else kth


def _reaching(values: Tensor, weights: Tensor, target: float) -> float:
    """The largest value such that the values not below it weigh `target` together; the least one if all weigh less.

    A radix selection: floats that are not negative are ordered as their bits are, so each ten bits of the result are
    the bin at which the weights, counted from the highest bin down, reach what is left of the target.
    """
    bits, found = values.view(torch.int32), 0
    for shift in (20, 10, 0):
        bins = (bits >> shift) - (found << 10)
        sums = torch.bincount(bins, weights)
        from_end = sums.flip(0).cumsum(dim=0).flip(0)
        num_reaching = int((from_end >= target).sum())
        index = num_reaching - 1 if num_reaching else int(bins.min())
        target -= float(from_end[index] - sums[index])
        inside = bins == index
        bits, weights, found = bits[inside], weights[inside], found << 10 | index
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32))


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
