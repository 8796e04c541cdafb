"""Draws the scenario of a seed.

Swarm testing (Groce et al., 2012): each seed disables most faults and policies and makes the others frequent. A new
variant gets a random stream of its own, so that the recorded seeds without it stay as they are.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from simulation.scenario import FAULTS, Capacity, Scenario, draw_mixed


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed; even seeds run under faults to the end, odd seeds do not."""
    rng = random.Random(seed)
    scenario = draw_mixed(rng, seed)
    theme = rng.choice((_unchanged, _unchanged, _preempting, _cancelling, _fragile, _poisoned))
    scenario = theme(rng, scenario)
    # Drawn last, so that a new variant leaves the rest of a seed's scenario as it was.
    fair = 0.5 if scenario.limits.scheduling_policy == "fair" else 0.05
    variants = (
        (_resumed, 0.2),
        (_deep, 0.15),
        (_shared, fair),
        (_updated, 0.15),
        (_estimated, 0.3),
        (_recomputing, 0.1),
        (_switching, 0.25),
        (_several, 0.6),
        (_spoiled, 0.1),
        (_cut_off, 0.15),
        (_switching_victims, 0.04),
        (_poisoned_workers, 0.06),
        (_rejecting, 0.08),
        (_copying, 0.1),
        (_adapted, 0.12),
        (_scoring, 0.15),
        (_pooling, 0.15),
        (_scoring_victims, 0.05),
        (_drafting, 0.2),
        (_drafting_alone, 0.1),
    )
    for variant, share in variants:
        if rng.random() < share:
            scenario = variant(rng, scenario)
    # Each of these has a random stream of its own.
    own_streams = (
        *((_branching, 0.06), (_constraining, 0.06), (_combined, 0.04), (_reweighing, 0.003), (_beside, 0.04)),
        *((_swapping_out, 0.05), (_with_snapshots, 0.1)),
    )
    for variant, share in own_streams:
        own = random.Random(f"{seed}:{variant.__name__}")
        if own.random() < share:
            scenario = variant(own, scenario)
    return scenario


def _changed(
    scenario: Scenario, limits: dict[str, Any] | None = None, weights: dict[str, float] | None = None, **fields: Any
) -> Scenario:
    """Replace some limits, weights and other fields of a scenario."""
    changed = replace(scenario.limits, **(limits or {}))
    return replace(scenario, limits=changed, weights=scenario.weights | (weights or {}), **fields)


def _unchanged(rng: random.Random, scenario: Scenario) -> Scenario:
    return scenario


def _preempting(rng: random.Random, scenario: Scenario) -> Scenario:
    """Short prompts with long answers in few blocks: many preemptions."""
    return _short_of_blocks(rng, scenario, budget=64, longest_prompt=8, pace=2)


def _cancelling(rng: random.Random, scenario: Scenario) -> Scenario:
    """Chunked prompts, late results and cancelled requests: preempted requests soon have blocks again."""
    order = rng.choice(("prefill_first", scenario.limits.scheduling_policy))
    scenario = _short_of_blocks(rng, scenario, budget=rng.choice((8, 12)), longest_prompt=24, pace=1)
    limits = {"scheduling_policy": order, "pipeline_depth": 3}
    return _changed(scenario, limits, cancel_after_preemption=0.5, late=0.0)


def _short_of_blocks(
    rng: random.Random, scenario: Scenario, *, budget: int, longest_prompt: int, pace: int
) -> Scenario:
    block_size = rng.choice((1, 1, 2, 4))
    limits = {"batching_strategy": rng.choice(("continuous", "adaptive")), "max_preemptions": rng.choice((1, 2, 4))}
    return _changed(
        scenario,
        limits | {"max_batch_size": 8, "target_batch_tokens": budget, "max_queue_size": 40},
        capacity=Capacity(rng.randint(24, 64) // block_size, block_size, 8, 200, 4096),
        longest_prompt=longest_prompt,
        shortest_answer=8,
        pace=pace,
    )


def _fragile(rng: random.Random, scenario: Scenario) -> Scenario:
    """Workers are replaced often, each with another capacity, and most prompts share a prefix."""
    template = tuple(rng.randrange(scenario.vocab_size) for _ in range(40))
    return _changed(
        scenario,
        {"prefix_cache": True},
        {"crash": 0.5, "replace": 0.3, "step_error": 0.3, "stale": 0.2},
        change=1.0,
        templates=(template,),
        salts=scenario.salts[:1],
    )


def _poisoned(rng: random.Random, scenario: Scenario) -> Scenario:
    """Only poison requests cause faults."""
    return replace(
        scenario,
        weights={name: weight for name, weight in scenario.weights.items() if name not in FAULTS or name == "cancel"},
        poison_per_mille=rng.choice((50, 150)),
        bad_per_mille=0,
        late=0.0,
        change=0.0,
        pace=rng.choice((1, 2)),
    )


def _resumed(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests resume answers that another server began."""
    return replace(scenario, resumed=rng.choice((0.2, 0.8)))


def _shared(rng: random.Random, scenario: Scenario) -> Scenario:
    """Several tenants with unequal load wait for few slots."""
    limits = replace(scenario.limits, scheduling_policy="fair", max_batch_size=rng.randint(1, 4), max_queue_size=1000)
    if rng.random() < 0.4:
        weights_of = {f"t{tenant}": rng.choice((0.5, 1.0, 4.0)) for tenant in range(2)}
        limits = replace(limits, policy=replace(limits.policy, share_weights=weights_of))
    scenario = replace(scenario, limits=limits, estimated=rng.choice((0.0, 1.0)))
    return _changed(scenario, weights={"submit": 2.0, "burst": 0.4}, num_tenants=rng.randint(2, 4))


def _several(rng: random.Random, scenario: Scenario) -> Scenario:
    """Several workers, which join, stop and are lost one by one."""
    weights = scenario.weights | {"join": 0.2, "stop": rng.choice((0.0, 0.1)), "deliver": 8.0, "launch": 8.0}
    if rng.random() < 0.5 and "launch" in weights:
        weights |= {"crash": 0.2, "step_error": rng.choice((0.0, 0.2))}
    if rng.random() < 0.7:
        limits = replace(scenario.limits, batching_strategy=rng.choice(("continuous", "continuous", "adaptive")))
        scenario = replace(scenario, limits=limits)
    return replace(
        scenario,
        weights=weights,
        num_workers=rng.randint(2, 4),
        pace=rng.choice((2, 4)),
        change=rng.choice((0.0, scenario.change)),
        slow=rng.choice((0.0, 0.0, 0.3)),
    )


def _spoiled(rng: random.Random, scenario: Scenario) -> Scenario:
    """Bad rows of requests that start together with the same prompt, in few blocks: others have read their blocks."""
    block_size = rng.choice((1, 2, 4))
    template = tuple(rng.randrange(scenario.vocab_size) for _ in range(rng.choice((4, 8, 12))))
    limits = {"target_batch_tokens": rng.choice((16, 64)), "pipeline_depth": rng.randint(2, 3), "prefix_cache": True}
    capacity = Capacity(rng.randint(24, 56) // block_size, block_size, 8, 64, 4096)
    return _changed(
        scenario,
        limits | {"batching_strategy": "continuous", "max_batch_size": 8, "max_queue_size": 40},
        {"burst": 1.0, "bad_token": rng.choice((0.05, 0.3)), "crash": rng.choice((0.05, 0.5))},
        capacity=capacity,
        bad_per_mille=rng.choice((50, 150)),
        longest_prompt=20,
        behind=0.8,
        pace=rng.choice((1, 2)),
        late=0.0,
        change=0.0,
        templates=(template,),
        salts=scenario.salts[:1],
    )


def _switching_victims(rng: random.Random, scenario: Scenario) -> Scenario:
    """An operator changes which of many sequences is preempted."""
    scenario = _short_of_blocks(rng, scenario, budget=64, longest_prompt=12, pace=2)
    weights, limits = (
        {"switch": 0.8, "burst": 0.8, "submit": 2.0},
        {"batching_strategy": "continuous", "max_preemptions": 4},
    )
    capacity = replace(scenario.capacity, num_blocks=56 // scenario.capacity.block_size)
    return _changed(scenario, limits, weights, capacity=capacity, switched=("preemption_policy",))


def _poisoned_workers(rng: random.Random, scenario: Scenario) -> Scenario:
    """Poison requests on several workers, some of which are stopping: the suspects run alone on one of them."""
    scenario = _several(rng, _poisoned(rng, scenario))
    weights = {"join": 4.0, "burst": 1.0, "submit": 2.0, "crash": 0.1, "stop": rng.choice((0.0, 0.5))}
    limits = {"batching_strategy": "continuous", "max_batch_size": 4, "max_queue_size": 40}
    limits["max_isolated_crashes"] = rng.choice((1, 2))
    workers = {"num_workers": rng.randint(2, 3), "change": 0.0, "slow": 0.0, "pace": 4}
    return _changed(scenario, limits, weights, capacity=Capacity(30, 4, 4, 64, 4096), longest_prompt=12, **workers)


def _cut_off(rng: random.Random, scenario: Scenario) -> Scenario:
    """Connections close when a plan is sent: the core has made the plan and goes on with the other workers."""
    return replace(scenario, unsent=rng.choice((0.01, 0.05)))


def _adapted(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests with and without adapters, which are loaded and unloaded under them; often too few indices."""
    keys = (b"\1" * 32, b"\2" * 32, b"\3" * 32)
    weights = {"load_adapter": rng.choice((0.5, 2.0)), "unload_adapter": rng.choice((0.1, 0.5))}
    return _changed(scenario, {"max_loras": rng.choice((1, 2, 3))}, weights, adapters=keys[: rng.choice((2, 3))])


def _updated(rng: random.Random, scenario: Scenario) -> Scenario:
    """A rolling update: some workers join with another model."""
    return _changed(scenario, weights={"crash": 0.3, "replace": 0.3}, updates=rng.choice((0.5, 1.0)))


def _estimated(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests come with expected output lengths."""
    return replace(scenario, estimated=rng.choice((0.3, 1.0)))


def _switching(rng: random.Random, scenario: Scenario) -> Scenario:
    """An operator changes limits and policies while the server runs."""
    weights = {"switch": rng.choice((0.1, 0.5))}
    return _changed(scenario, weights=weights, num_tenants=max(scenario.num_tenants, rng.choice((1, 2, 4))))


def _deep(rng: random.Random, scenario: Scenario) -> Scenario:
    """Deep positions cost more and many prompts share a prefix, so prompts start where tokens are expensive."""
    template = tuple(rng.randrange(scenario.vocab_size) for _ in range(100))
    target, stretch = rng.choice((0.1, 0.3)), rng.choice((2.0, 4.0, 50.0))
    policy = replace(scenario.limits.policy, target_inter_token_latency_seconds=target, max_prefill_slowdown=stretch)
    limits = {"batching_strategy": "continuous", "max_batch_size": 24, "target_batch_tokens": 512, "policy": policy}
    return _changed(
        scenario,
        limits | {"max_queue_size": 40, "max_queue_tokens": 10_000, "prefix_cache": True},
        {"burst": 0.8},
        capacity=Capacity(200, 4, 24, 200, 4096),
        longest_prompt=24,
        behind=0.3,
        pace=2,
        step_seconds=(0.01, 0.001, rng.choice((2e-4, 5e-4))),
        templates=(template,),
        salts=scenario.salts[:1],
    )


def _beside(rng: random.Random, scenario: Scenario) -> Scenario:
    """Scores and vectors are computed beside decodes, in steps with time for many of their tokens."""
    scenario = _deep(rng, scenario)
    policy = replace(scenario.limits.policy, max_prefill_slowdown=rng.choice((1.5, 2.0)))
    scored, pooled = rng.choice(((0.0, 0.7), (0.7, 0.0), (0.4, 0.6)))
    fields = {"scored": scored, "pooled": pooled, "behind": 0.0, "longest_prompt": 60}
    limits = {"scheduling_policy": "fifo", "policy": policy}
    return _changed(scenario, limits, **fields, step_seconds=(0.01, 0.001, 1e-5))


def _recomputing(rng: random.Random, scenario: Scenario) -> Scenario:
    """Few blocks and small steps: a preempted request is recomputed in chunks beside younger decodes."""
    budget = rng.choice((4, 6, 10))
    scenario = _short_of_blocks(rng, scenario, budget=budget, longest_prompt=20, pace=rng.choice((1, 2)))
    order = rng.choice(("fifo", "priority", "shortest"))
    limits = {"scheduling_policy": order, "pipeline_depth": rng.randint(1, 3), "max_preemptions": 4}
    return _changed(scenario, limits, late=0.0)


def _rejecting(rng: random.Random, scenario: Scenario) -> Scenario:
    """A server that rejects deadlines in the queue, with few slots and expected lengths, where requests have some."""
    if not scenario.deadlines:
        return scenario
    limits = {"reject_unmeetable_deadlines": True, "max_batch_size": rng.randint(1, 4)}
    return _changed(scenario, limits, {"submit": 2.0, "burst": 0.4}, estimated=rng.choice((0.0, 1.0)))


def _scoring(rng: random.Random, scenario: Scenario) -> Scenario:
    return replace(scenario, scored=rng.choice((0.2, 0.8)))


def _pooling(rng: random.Random, scenario: Scenario) -> Scenario:
    return replace(scenario, pooled=rng.choice((0.2, 0.8)))


def _scoring_victims(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests with scores in flight are preempted and soon run again: both admissions report the same positions."""
    scenario = _cancelling(rng, scenario)
    return _changed(scenario, weights={"burst": 0.8, "submit": 2.0, "bad_token": 0.2}, scored=0.8)


def _drafting(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests verify drafts, which cost little."""
    limits = {"adaptive_drafts": rng.random() < 0.5}
    step_seconds = 0.01, rng.choice((0.0, 1e-5, 0.0005)), 0.0
    return _changed(scenario, limits, drafted=rng.choice((0.4, 1.0)), step_seconds=step_seconds)


def _drafting_alone(rng: random.Random, scenario: Scenario) -> Scenario:
    """Few requests with long answers verify drafts, in few or many blocks."""
    limits = {"adaptive_drafts": rng.random() < 0.5, "batching_strategy": "continuous", "prefix_cache": True}
    limits |= {"max_batch_size": rng.choice((1, 2, 4, 8)), "target_batch_tokens": rng.choice((6, 16, 64))}
    block_size = rng.choice((1, 2, 4))
    capacity = Capacity(rng.randint(16, 80) // block_size, block_size, 8, 200, 4096)
    return _changed(
        scenario,
        limits,
        capacity=capacity,
        longest_prompt=12,
        shortest_answer=8,
        bad_per_mille=rng.choice((scenario.bad_per_mille, 20)),
        pace=rng.choice((1, 2)),
        drafted=1.0,
        step_seconds=(0.01, 1e-5, 0.0),
    )


def _branching(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests have several outputs, or are beam searches; some callers disconnect."""
    weights = {"branch": rng.choice((0.3, 1.0)), "disconnect": rng.choice((0.0, 0.1, 0.4))}
    scenario = _changed(scenario, weights=weights, beams=rng.choice((0.0, 0.3, 1.0)))
    hazard = rng.choice((_unchanged, _unchanged, _unchanged, _updated, _switching, _draining, _rejecting_siblings))
    return hazard(rng, scenario)


def _reweighing(rng: random.Random, scenario: Scenario) -> Scenario:
    """An operator changes the weights of tenants."""
    scenario = _switching(rng, _shared(rng, scenario))
    policy = replace(scenario.limits.policy, share_weights={"t0": 4.0, "t1": 0.5})
    return _changed(scenario, {"policy": policy}, switched=("policy",))


def _draining(rng: random.Random, scenario: Scenario) -> Scenario:
    return _changed(scenario, weights={"drain": 0.3})


def _rejecting_siblings(rng: random.Random, scenario: Scenario) -> Scenario:
    return _rejecting(rng, replace(scenario, deadlines=0.7))


def _constraining(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests have grammars, some of which allow no further token at some point."""
    weights = {"compile": rng.choice((1.0, 4.0))}
    late = random.Random(f"{scenario.seed}:late").choice((0, 100, 500))
    return _changed(scenario, weights=weights, constrained=rng.choice((0.3, 0.9)), late_per_mille=late)


def _combined(rng: random.Random, scenario: Scenario) -> Scenario:
    """Several ways to sample at once, on several workers that are lost, while limits and policies change."""
    features = (_branching, _constraining, _adapted, _drafting, _scoring, _pooling, _resumed, _copying, _updated)
    for feature in rng.sample(features, rng.randint(3, 6)):
        scenario = feature(rng, scenario)
    for hazard in (_several, _switching, _cut_off, _short):
        if rng.random() < 0.5:
            scenario = hazard(rng, scenario)
    share = rng.choice((0.2, 0.4))  # all of them together would leave no plain request
    parts = {name: min(share, getattr(scenario, name)) for name in ("scored", "pooled", "resumed")}
    weights = {"crash": rng.choice((0.05, 0.3)), "burst": 0.2}
    return _changed(scenario, weights=weights, deadlines=rng.choice((0.0, 0.1)), **parts)


def _swapping_out(rng: random.Random, scenario: Scenario) -> Scenario:
    """Preempted sequences keep their blocks in host memory, where copies take less time than computing them again."""
    scenario = rng.choice((_unchanged, _recomputing, _short, _swapping_both_ways, _spoiled))(rng, scenario)
    scenario = rng.choice((_unchanged, _unchanged, _pooling, _scoring, _several))(rng, scenario)
    return _changed(
        scenario,
        {"pipeline_depth": rng.randint(1, 3)},
        {"submit": 2.0, "burst": 0.8},
        ticks=120,
        step_seconds=(0.01, 0.001, rng.choice((0.0, 1e-4))),
        swap_blocks=rng.choice((2, 6, 64)),
        swap_seconds=rng.choice((0.0, 0.0003, 0.001)),
    )


def _swapping_both_ways(rng: random.Random, scenario: Scenario) -> Scenario:
    """Prompts go first and many short sequences need a block in each step: a plan may swap in, and then out."""
    scenario = _short(rng, scenario)
    limits = {"scheduling_policy": "prefill_first", "max_preemptions": 4, "prefix_cache": rng.random() < 0.5}
    capacity = Capacity(rng.randint(40, 64), 1, 8, 64, 4096)
    return _changed(scenario, limits, capacity=capacity, longest_prompt=10)


def _with_snapshots(rng: random.Random, scenario: Scenario) -> Scenario:
    """The model has recurrent state, of which a worker keeps no, few or many snapshots."""
    scenario = rng.choice((_unchanged, _beginning_alike, _beginning_alike, _beginning_alike))(rng, scenario)
    hazards = (_spoiled, _copying, _recomputing, _several, _branching, _adapted, _constraining, _drafting)
    others = (_swapping_out, _scoring, _pooling, _fragile, _switching, _preempting, _cancelling)
    for hazard in rng.sample((*hazards, *others), rng.choice((0, 0, 1, 1, 2))):
        scenario = hazard(rng, scenario)
    limits = {"prefix_cache": rng.random() < 0.95, "max_queue_overtakes": rng.choice((0, 1, 3, 16, 16, 16))}
    late = min(scenario.late_per_mille, 50)  # each costs a whole prompt
    snapshots = rng.choice((0, 1, 2, 3, 6, 64))
    return _changed(scenario, limits, late_per_mille=late, has_state=True, state_snapshots=snapshots)


def _beginning_alike(rng: random.Random, scenario: Scenario) -> Scenario:
    """Many prompts begin like others that wait, run or have ended, and leave them at several places."""
    block_size, vocab_size = rng.choice((1, 2, 2, 4)), rng.choice((3, scenario.vocab_size))
    length = rng.choice((8, 12, 30))
    templates = [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(rng.choice((1, 2, 3)))]
    templates += [template[: length // 2] + template[::-1] for template in templates]
    limits = {"prefix_cache": True, "max_queue_size": 1000, "max_queue_tokens": 1_000_000}
    limits |= {"target_batch_tokens": rng.choice((6, 16, 64)), "pipeline_depth": rng.randint(1, 3)}
    limits["batching_strategy"] = rng.choice((scenario.limits.batching_strategy, "continuous"))
    num_blocks = rng.choice((48, 48, 64 * block_size)) // block_size
    return _changed(
        scenario,
        limits,
        {"submit": 2.0, "burst": rng.choice((0.1, 0.5))},
        capacity=Capacity(num_blocks, block_size, 8, 200, 4096),
        vocab_size=vocab_size,
        longest_prompt=rng.choice((length, 2 * length)),
        pace=rng.choice((1, 2)),
        templates=tuple(templates),
        salts=rng.choice((scenario.salts[:1], scenario.salts)),
    )


def _short(rng: random.Random, scenario: Scenario) -> Scenario:
    return _short_of_blocks(rng, scenario, budget=64, longest_prompt=16, pace=2)


def _copying(rng: random.Random, scenario: Scenario) -> Scenario:
    """Prompts begin alike and differ inside a block, while rows are in flight and may prove to be bad."""
    vocab_size = rng.choice((3, scenario.vocab_size))
    template = tuple(rng.randrange(vocab_size) for _ in range(rng.choice((3, 10, 30))))
    limits = {"pipeline_depth": rng.randint(2, 4), "scheduling_policy": rng.choice(("fifo", "prefill_first"))}
    return _changed(
        scenario,
        limits | {"prefix_cache": True, "max_queue_size": 1000, "max_queue_tokens": 1_000_000},
        {"submit": 2.0, "burst": 0.4},
        capacity=Capacity(rng.choice((8, 16, 64)), rng.choice((3, 4, 8, 16)), 8, 200, rng.choice((10, 64, 4096))),
        vocab_size=vocab_size,
        longest_prompt=40,
        behind=rng.choice((0.3, 0.8)),
        bad_per_mille=rng.choice((scenario.bad_per_mille, 10, 100)),
        pace=rng.choice((0, 1)),
        templates=(template,),
        salts=rng.choice((scenario.salts[:1], scenario.salts)),
    )
