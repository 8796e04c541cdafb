"""The distribution that a row is drawn from, after temperature and truncation.

In transformers' order, each over what the one before leaves: temperature, top_n_sigma, top_k, top_p, min_p, typical_p,
XTC. Tokens that tie with the last kept one are kept, so neither the order of equal tokens nor other rows of the batch
affect the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lineclear.worker.kernels.triton_support import is_usable

from .logits import is_on_host
from .sampling_metadata import Draws

_NUM_CANDIDATES = 256
_MIN_TOPK_VOCABULARY = 4096
"""Larger vocabularies are not sorted on a CPU."""
_LEAST_TEMPERATURE = 0.01
_INFINITY_BITS = 0x7F800000
"""Bits of the largest float32."""
_HIGHEST_BIT = 30
"""Of a float32 that is not negative."""


def truncated_weights(logits: Tensor, draws: Draws) -> Tensor:
    """Return weights [num_rows, vocabulary], 0 for tokens that are not drawn. They need not sum to 1."""
    parameters = draws.parameters
    scaled = logits[draws.rows]
    temperature = parameters["temperature"]
    if "dynatemp_range" in draws.reshapes:
        temperature = _dynamic_temperature(scaled, draws)
    scaled = scaled.div_(temperature)
    if "top_n_sigma" in draws.reshapes:
        _mask_below_sigma(scaled, parameters["top_n_sigma"])
    probabilities = torch.softmax(scaled, dim=-1)
    min_p_cutoff = parameters["min_p"] * probabilities.amax(dim=-1, keepdim=True)
    cutoff = torch.maximum(_cutoff(probabilities, draws), min_p_cutoff)
    weights = probabilities.mul_(probabilities >= cutoff)
    if "typical_p" in draws.reshapes:
        rows = draws.reshapes["typical_p"]
        weights[rows] *= _is_typical(weights[rows], parameters["typical_p"][rows])
    if "xtc_probability" in draws.reshapes:
        _exclude_top_choices(weights, parameters["xtc_threshold"])
    return weights


def _dynamic_temperature(logits: Tensor, draws: Draws) -> Tensor:
    """Return [num_rows, 1]: temperature - range to temperature + range, by the entropy (llama.cpp's temp_ext)."""
    temperature, reach = draws.parameters["temperature"], draws.parameters["dynatemp_range"]
    entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1, keepdim=True)
    most = torch.isfinite(logits).sum(dim=-1, keepdim=True).clamp(min=2).log()
    lowest = (temperature - reach).clamp(min=0.0)
    spread = (entropy / most).clamp(0.0, 1.0) ** draws.parameters["dynatemp_exponent"]
    dynamic = lowest + (temperature + reach - lowest) * spread
    chosen: Tensor = torch.where(reach > 0, dynamic.clamp(min=_LEAST_TEMPERATURE), temperature)
    return chosen


def _mask_below_sigma(logits: Tensor, count: Tensor) -> None:
    """Drop logits more than `count` standard deviations below the highest one (llama.cpp's top-n-sigma)."""
    is_finite = torch.isfinite(logits)
    finite = logits.masked_fill(~is_finite, 0.0)
    size = is_finite.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = finite.sum(dim=-1, keepdim=True) / size
    variance = ((finite - mean) * is_finite).square_().sum(dim=-1, keepdim=True) / size
    lowest = logits.amax(dim=-1, keepdim=True) - count * variance.sqrt()
    logits.masked_fill_((logits < lowest) & (count > 0), float("-inf"))


def _is_typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Return whether a token is in the smallest set of this mass next to the entropy (Meister et al. 2022)."""
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(probabilities).sum(dim=-1, keepdim=True)
    distances = (-probabilities.log() - entropy).abs()
    is_typical: Tensor = distances <= _farthest_kept(distances, probabilities, typical_p)
    return is_typical


def _farthest_kept(distances: Tensor, probabilities: Tensor, typical_p: Tensor) -> Tensor:
    """Return [rows, 1]: the least distance whose tokens, with all nearer ones, reach `typical_p`.

    Searched as in `_cutoff`: among the nearest tokens, then by radix selection; by bisection on other devices.
    """
    vocabulary = distances.shape[-1]
    if not is_on_host(distances):
        nearness, wide = _INFINITY_BITS - distances.view(torch.int32), wide_dtype(distances)
        least = largest_reaching(nearness, probabilities, typical_p.to(wide))
        return (_INFINITY_BITS - least).view(torch.float32)
    uses_candidates = _is_searched(distances)
    near, ids = distances.topk(_NUM_CANDIDATES if uses_candidates else vocabulary, dim=-1, largest=False)
    mass = probabilities.gather(1, ids).cumsum(dim=-1, dtype=wide_dtype(probabilities))
    last = (mass < typical_p).sum(dim=-1, keepdim=True)
    farthest = near.gather(1, last.clamp(max=near.shape[-1] - 1))
    if uses_candidates:
        for row in (last[:, 0] == _NUM_CANDIDATES).nonzero()[:, 0].tolist():
            nearness = _INFINITY_BITS - distances[row].view(torch.int32)
            found = _largest_reaching(nearness, probabilities[row].double(), float(typical_p[row]))
            farthest[row] = torch.tensor(_INFINITY_BITS - found, dtype=torch.int32).view(torch.float32)
    return farthest


def _exclude_top_choices(weights: Tensor, threshold: Tensor) -> None:
    """Keep the least likely of the tokens above the threshold, and all less likely ones (llama.cpp's XTC)."""
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    least = torch.where(probabilities >= threshold, probabilities, float("inf")).amin(dim=-1, keepdim=True)
    weights.masked_fill_(probabilities > least, 0.0)


def _cutoff(probabilities: Tensor, draws: Draws) -> Tensor:
    """Return [rows, 1]: the probability of the least likely token that top_k, and then top_p, keep.

    On a CPU, sorting a vocabulary costs more than all other work, and a few hundred candidates nearly always suffice.
    Rows for which they do not (a flat distribution, a large top_k) use a radix selection. On other devices that check
    would make the host wait, and all rows are bisected.
    """
    top_k, top_p = draws.parameters["top_k"], draws.parameters["top_p"]
    if not is_on_host(probabilities):
        return _cutoff_by_bisection(probabilities, top_k, top_p)
    vocabulary = probabilities.shape[-1]
    uses_candidates = _is_searched(probabilities)
    candidates = probabilities.topk(_NUM_CANDIDATES if uses_candidates else vocabulary, dim=-1).values
    cutoff = _cutoff_of_sorted(candidates, top_k, top_p)
    if uses_candidates:
        least = candidates[:, -1:]
        is_unknown = ((least >= cutoff) & (least > 0)) | (top_k > _NUM_CANDIDATES)
        for row in is_unknown[:, 0].nonzero()[:, 0].tolist():
            cutoff[row] = _cutoff_by_radix(probabilities[row], int(top_k[row]), float(top_p[row]))
    return cutoff


def _is_searched(rows: Tensor) -> bool:
    """Whether rows [num_rows, vocabulary] on a CPU are searched instead of sorted."""
    return rows.shape[-1] > _MIN_TOPK_VOCABULARY


def _cutoff_by_bisection(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the cutoff [rows, 1]; parameters are [rows, 1]."""
    keys, wide = probabilities.view(torch.int32), wide_dtype(probabilities)
    kth = largest_reaching(keys, None, top_k.to(wide)).view(torch.float32)
    kept = torch.where(probabilities >= kth, probabilities, 0.0)
    total = torch.where(top_k > 0, kept.sum(dim=-1, keepdim=True, dtype=wide), 1.0)
    target = torch.where(top_p < 1, top_p * total, 0.0)
    return torch.maximum(kth, largest_reaching(keys, probabilities, target).view(torch.float32))


def largest_reaching(keys: Tensor, weights: Tensor | None, targets: Tensor) -> Tensor:
    """Return [num_rows, 1] int32: the largest k of each row such that its keys >= k weigh the target or more together.

    By bisection, without sorting and without a wait of the host. Floats that are not negative are ordered like their
    bits, so k is found bit by bit: by Triton in one launch that reads a row from the cache of the device, without it by
    some hundred operations of torch, each over all rows.

    keys [num_rows, vocabulary] int32, weights the same in float32 (None: 1 each), targets [num_rows, 1]. 0 where the
    target is not positive, and where all weights together do not reach it. Sums are in the type of the targets.
    """
    if keys.is_cuda and is_usable():
        from .triton_threshold import largest_reaching as by_triton

        return by_triton(keys, weights, targets)
    weighed = torch.ones((), device=keys.device) if weights is None else weights
    found = torch.zeros_like(targets, dtype=torch.int32)
    for bit in range(_HIGHEST_BIT, -1, -1):
        candidate = found | 1 << bit
        reached = torch.where(keys >= candidate, weighed, 0.0).sum(dim=-1, keepdim=True, dtype=targets.dtype)
        found = torch.where((reached >= targets) & (targets > 0), candidate, found)
    return found


def _cutoff_of_sorted(candidates: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the cutoff [rows, 1] from the most likely tokens [rows, count] in descending order."""
    count = candidates.shape[-1]
    last = torch.where(top_k > 0, top_k, count).clamp(max=count) - 1
    kept = candidates >= candidates.gather(1, last)
    mass = torch.where(kept, candidates, 0.0).to(wide_dtype(candidates))
    before = mass.cumsum(dim=-1) - mass
    total = torch.where(top_k > 0, mass.sum(dim=-1, keepdim=True), 1.0)
    kept &= (before < top_p * total) | (top_p >= 1)
    kept[:, 0] = True  # rounding must not remove every token
    return torch.where(kept, candidates, float("inf")).amin(dim=-1, keepdim=True)


def _cutoff_by_radix(probabilities: Tensor, top_k: int, top_p: float) -> float:
    """Return the cutoff of one row [vocabulary] without sorting."""
    mass = probabilities.double()
    kth, total = 0.0, 1.0
    if top_k > 0:
        kth = _largest_value_reaching(probabilities, torch.ones_like(mass), top_k)
        mass.mul_(probabilities >= kth)
        total = float(mass.sum())
    return max(kth, _largest_value_reaching(probabilities, mass, top_p * total)) if top_p < 1 else kth


def _largest_value_reaching(values: Tensor, weights: Tensor, target: float) -> float:
    """Return `_largest_reaching` of non-negative floats, which are ordered like their bits."""
    found = _largest_reaching(values.view(torch.int32), weights, target)
    return float(torch.tensor(found, dtype=torch.int32).view(torch.float32))


def _largest_reaching(keys: Tensor, weights: Tensor, target: float) -> int:
    """Return the largest k such that all keys >= k weigh `target` together; the least key if all weigh less.

    A radix selection over keys [vocabulary], int32: each ten bits of the result are the bin at which the weights,
    summed from the highest bin down, reach the rest of the target. NaN of a row without logits may be a negative key.
    """
    bits, prefix = keys.clamp(min=0), 0
    for shift in (20, 10, 0):
        bins = (bits >> shift) - (prefix << 10)
        sums = torch.bincount(bins, weights)
        from_end = sums.flip(0).cumsum(dim=0).flip(0)
        num_reaching = int((from_end >= target).sum())
        index = num_reaching - 1 if num_reaching else int(bins.min())
        target -= float(from_end[index] - sums[index])
        inside = bins == index
        bits, weights, prefix = bits[inside], weights[inside], prefix << 10 | index
    return prefix


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type of running sums: float64 where the device supports it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
