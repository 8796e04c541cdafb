"""Draws the scenario of a seed: limits, workers, requests and faults.

Swarm testing (Groce et al., 2012): each seed disables most faults and policies and makes the others frequent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from support.toy import expected, fingerprint

from lineclear.scheduler.core.limits import SWITCHABLE, CoreLimits
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES, QUEUE_ORDERS, STRATEGIES, PolicySettings
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling

MODELS = ("", "b")
_FAULTS = (
    *("cancel", "finish", "crash", "replace", "step_error", "bad_token"),
    *("malformed", "stale", "clear_cache", "drain"),
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a worker."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_model_len: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a run that is drawn before its first call."""

    seed: int
    liveness: bool
    """Faults stop after `ticks` actions, and then all requests must end. Otherwise faults continue to the end."""
    ticks: int
    limits: CoreLimits
    capacity: Capacity
    vocab_size: int
    weights: dict[str, float]
    """Relative frequency of each action."""
    longest_prompt: int
    shortest_answer: int
    """Least max_tokens; 1 draws from all lengths."""
    change: float
    """Share of new workers with another capacity than the first."""
    pace: int
    """Plans computed and results delivered between two actions."""
    cancel_after_preemption: float
    """Share of plans with a preemption after which a request is cancelled."""
    late: float
    """Share of engine iterations that do not plan, or plan only once."""
    bad_per_mille: int
    """Share of contexts whose logits are not finite."""
    poison_per_mille: int
    """Share of requests that crash the worker at some position of their answer."""
    step_seconds: tuple[float, float, float]
    """Per step, per token, and per cached position that a token attends to."""
    codec: bool
    """Messages cross the wire codec in the unchecked run."""
    templates: tuple[tuple[int, ...], ...]
    salts: tuple[bytes, ...]
    deadlines: float
    """Share of requests with a deadline."""
    num_ids: int
    resumed: float = 0.0
    """Share of requests with the beginning of their answer."""
    behind: float = 0.0
    """Share of prompts that are the first template and a few more tokens."""
    num_tenants: int = 1
    updates: float = 0.0
    """Share of new workers that may have another model than the last."""
    num_workers: int = 1
    """Workers that are joined at the same time, if none is lost."""
    slow: float = 0.0
    """Share of workers that compute a step only now and then."""
    estimated: float = 0.0
    """Share of requests with an expected output length, right or wrong."""
    unsent: float = 0.0
    """Share of plans that do not reach their worker, which is lost a little later."""


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed; even seeds run under faults to the end, odd seeds do not."""
    rng = random.Random(seed)
    scenario = _mixed(rng, seed)
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
    )
    for variant, share in variants:
        if rng.random() < share:
            scenario = variant(rng, scenario)
    return scenario


def _mixed(rng: random.Random, seed: int) -> Scenario:
    vocab_size = rng.choice((3, 17, 97, 97))
    weights = {"submit": rng.choice((0.5, 1.0, 2.0)), "burst": rng.choice((0.0, 0.1, 0.4)), "idle": 0.3}
    weights["launch"] = rng.choice((2.0, 5.0))
    weights["deliver"] = rng.choice((2.0, 5.0))
    for fault in _FAULTS:
        if rng.random() < 0.3:
            weights[fault] = rng.choice((0.05, 0.2, 0.8)) * (0.15 if fault in ("drain", "replace", "oom") else 1.0)
    return Scenario(
        seed=seed,
        liveness=seed % 2 == 1,
        ticks=rng.choice((30, 60, 90, 120)),
        limits=_draw_limits(rng),
        capacity=draw_capacity(rng),
        vocab_size=vocab_size,
        weights=weights,
        longest_prompt=200,
        shortest_answer=1,
        change=0.3,
        pace=rng.choice((0, 1, 2)),
        cancel_after_preemption=0.0,
        late=rng.choice((0.0, 0.0, 0.3)),
        bad_per_mille=rng.choice((0, 0, 0, 10, 50)),
        poison_per_mille=rng.choice((0, 0, 0, 0, 50)),
        step_seconds=(rng.choice((0.0, 0.01)), rng.choice((0.0, 0.0005, 0.01)), rng.choice((0.0, 1e-5))),
        codec=rng.random() < 0.25,
        templates=tuple(
            tuple(rng.randrange(vocab_size) for _ in range(rng.choice((4, 20, 60)))) for _ in range(rng.randrange(3))
        ),
        salts=(b"", b"a", b"b")[: rng.randint(1, 3)],
        deadlines=rng.choice((0.0, 0.0, 0.2, 0.7)),
        num_ids=rng.choice((6, 1000, 1000, 1000)),
    )


def _unchanged(rng: random.Random, scenario: Scenario) -> Scenario:
    return scenario


def _preempting(rng: random.Random, scenario: Scenario) -> Scenario:
    """Short prompts with long answers in few blocks: many preemptions."""
    return _short_of_blocks(rng, scenario, budget=64, longest_prompt=8, pace=2)


def _cancelling(rng: random.Random, scenario: Scenario) -> Scenario:
    """Chunked prompts, late results and cancelled requests: preempted requests soon have blocks again."""
    order = rng.choice(("prefill_first", scenario.limits.scheduling_policy))
    scenario = _short_of_blocks(rng, scenario, budget=rng.choice((8, 12)), longest_prompt=24, pace=1)
    limits = replace(scenario.limits, scheduling_policy=order, pipeline_depth=3)
    return replace(scenario, limits=limits, cancel_after_preemption=0.5, late=0.0)


def _short_of_blocks(
    rng: random.Random, scenario: Scenario, *, budget: int, longest_prompt: int, pace: int
) -> Scenario:
    block_size = rng.choice((1, 1, 2, 4))
    return replace(
        scenario,
        limits=replace(
            scenario.limits,
            batching_strategy=rng.choice(("continuous", "adaptive")),
            max_batch_size=8,
            target_batch_tokens=budget,
            max_queue_size=40,
            max_preemptions=rng.choice((1, 2, 4)),
        ),
        capacity=Capacity(rng.randint(24, 64) // block_size, block_size, 8, 200, 4096),
        longest_prompt=longest_prompt,
        shortest_answer=8,
        pace=pace,
    )


def _fragile(rng: random.Random, scenario: Scenario) -> Scenario:
    """Workers are replaced often, each with another capacity, and most prompts share a prefix."""
    template = tuple(rng.randrange(scenario.vocab_size) for _ in range(40))
    return replace(
        scenario,
        limits=replace(scenario.limits, prefix_cache=True),
        weights=scenario.weights | {"crash": 0.5, "replace": 0.3, "step_error": 0.3, "stale": 0.2},
        change=1.0,
        templates=(template,),
        salts=scenario.salts[:1],
    )


def _poisoned(rng: random.Random, scenario: Scenario) -> Scenario:
    """Only poison requests cause faults."""
    return replace(
        scenario,
        weights={name: weight for name, weight in scenario.weights.items() if name not in _FAULTS or name == "cancel"},
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
    weights = scenario.weights | {"submit": 2.0, "burst": 0.4}
    scenario = replace(scenario, estimated=rng.choice((0.0, 1.0)))
    return replace(scenario, limits=limits, weights=weights, num_tenants=rng.randint(2, 4))


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
    limits = replace(
        scenario.limits,
        batching_strategy="continuous",
        max_batch_size=8,
        target_batch_tokens=rng.choice((16, 64)),
        pipeline_depth=rng.randint(2, 3),
        max_queue_size=40,
        prefix_cache=True,
    )
    return replace(
        scenario,
        limits=limits,
        capacity=Capacity(rng.randint(24, 56) // block_size, block_size, 8, 64, 4096),
        weights=scenario.weights | {"burst": 1.0, "bad_token": rng.choice((0.05, 0.3))},
        bad_per_mille=rng.choice((50, 150)),
        longest_prompt=20,
        behind=0.8,
        pace=rng.choice((1, 2)),
        late=0.0,
        change=0.0,
        templates=(template,),
        salts=scenario.salts[:1],
    )


def _cut_off(rng: random.Random, scenario: Scenario) -> Scenario:
    """Connections close when a plan is sent: the core has made the plan and goes on with the other workers."""
    return replace(scenario, unsent=rng.choice((0.01, 0.05)))


def _updated(rng: random.Random, scenario: Scenario) -> Scenario:
    """A rolling update: some workers join with another model."""
    weights = scenario.weights | {"crash": 0.3, "replace": 0.3}
    return replace(scenario, updates=rng.choice((0.5, 1.0)), weights=weights)


def _estimated(rng: random.Random, scenario: Scenario) -> Scenario:
    """Requests come with expected output lengths."""
    return replace(scenario, estimated=rng.choice((0.3, 1.0)))


def _switching(rng: random.Random, scenario: Scenario) -> Scenario:
    """An operator changes limits and policies while the server runs."""
    weights = scenario.weights | {"switch": rng.choice((0.1, 0.5))}
    return replace(scenario, weights=weights, num_tenants=max(scenario.num_tenants, rng.choice((1, 2, 4))))


def draw_switch(rng: random.Random, limits: CoreLimits) -> CoreLimits:
    """Return limits of which some differ, as an operator may change them."""
    other = _draw_limits(rng)
    if rng.random() < 0.3:
        return replace(limits, scheduling_policy="fair" if limits.scheduling_policy != "fair" else "fifo")
    names = rng.sample(sorted(SWITCHABLE), rng.choice((1, 1, 2, 4, len(SWITCHABLE))))
    return replace(limits, **{name: getattr(other, name) for name in names})


def _deep(rng: random.Random, scenario: Scenario) -> Scenario:
    """Deep positions cost more and many prompts share a prefix, so prompts start where tokens are expensive."""
    template = tuple(rng.randrange(scenario.vocab_size) for _ in range(100))
    target, stretch = rng.choice((0.1, 0.3)), rng.choice((2.0, 4.0, 50.0))
    policy = replace(scenario.limits.policy, target_inter_token_latency_seconds=target, max_prefill_slowdown=stretch)
    return replace(
        scenario,
        limits=replace(
            scenario.limits,
            batching_strategy="continuous",
            max_batch_size=24,
            target_batch_tokens=512,
            max_queue_size=40,
            max_queue_tokens=10_000,
            prefix_cache=True,
            policy=policy,
        ),
        capacity=Capacity(200, 4, 24, 200, 4096),
        weights=scenario.weights | {"burst": 0.8},
        longest_prompt=24,
        behind=0.3,
        pace=2,
        step_seconds=(0.01, 0.001, rng.choice((2e-4, 5e-4))),
        templates=(template,),
        salts=scenario.salts[:1],
    )


def _recomputing(rng: random.Random, scenario: Scenario) -> Scenario:
    """Few blocks and small steps: a preempted request is recomputed in chunks beside younger decodes."""
    budget = rng.choice((4, 6, 10))
    scenario = _short_of_blocks(rng, scenario, budget=budget, longest_prompt=20, pace=rng.choice((1, 2)))
    order = rng.choice(("fifo", "priority", "shortest"))
    limits = replace(scenario.limits, scheduling_policy=order, pipeline_depth=rng.randint(1, 3), max_preemptions=4)
    return replace(scenario, limits=limits, late=0.0)


def is_bad(context: Sequence[int], per_mille: int) -> bool:
    """Return whether the logits after `context` are non-finite, for that share of contexts."""
    return per_mille > 0 and (sum(context) * 2654435761 + len(context) * 40503) % 1000 < per_mille


def poison(seed: int, per_mille: int) -> str:
    """Return the effect of the request with that seed on its worker: "crash", "memory" (out of memory) or ""."""
    if seed * 2654435761 % 1000 >= per_mille:
        return ""
    return "memory" if seed % 3 == 0 else "crash"


def draw_capacity(rng: random.Random) -> Capacity:
    """Return a worker capacity from tiny to large."""
    block_size = rng.choice((1, 2, 3, 4, 4, 8, 16))
    positions = rng.choice((rng.randint(4, 40), rng.randint(20, 80), rng.randint(40, 120), rng.randint(100, 600)))
    return Capacity(
        num_blocks=max(1, min(64, positions // block_size)),
        block_size=block_size,
        num_slots=rng.choice((rng.randint(1, 8), 8)),
        max_model_len=rng.choice((16, 64, 200)),
        max_step_tokens=rng.choice((rng.randint(1, 16), 64, 4096)),
    )


def _draw_limits(rng: random.Random) -> CoreLimits:
    return CoreLimits(
        max_batch_size=rng.choice((rng.randint(1, 8), 8)),
        target_batch_tokens=rng.choice((rng.randint(1, 4), rng.randint(4, 16), rng.randint(16, 64), 64)),
        pipeline_depth=rng.randint(1, 3),
        max_queue_size=rng.choice((rng.randint(1, 4), rng.randint(4, 40), 1000, 1000)),
        max_queue_tokens=rng.choice((rng.randint(1, 100), 400, 1_000_000, 1_000_000)),
        max_preemptions=rng.randint(0, 4),
        max_queue_overtakes=rng.choice((0, 1, 3, 16)),
        max_isolated_crashes=rng.choice((1, 1, 2)),
        max_isolated_kills=rng.choice((1, 3, 3)),
        prefix_cache=rng.random() < 0.7,
        cache_secret=b"secret" if rng.random() < 0.5 else b"",
        batching_strategy=rng.choice(tuple(STRATEGIES)),
        scheduling_policy=rng.choice(tuple(QUEUE_ORDERS)),
        preemption_policy=rng.choice(tuple(PREEMPTION_POLICIES)),
        policy=PolicySettings(
            min_batch_size=rng.choice((1, 1, 2, 4)),
            batch_timeout_seconds=rng.choice((0.0, 0.05, 0.1, rng.random())),
            priority_aging_seconds=rng.choice((0.01, 1.0, 30.0)),
            target_inter_token_latency_seconds=rng.choice((0.0, 0.005, 0.05, 0.2)),
            max_prefill_slowdown=rng.choice((1.0, 2.0, 2.0, 50.0)),
        ),
    )


def draw_request(
    rng: random.Random, scenario: Scenario, number: int, now: float, recent: Sequence[tuple[int, ...]]
) -> Request:
    """Return a request with `number` as its seed. Some prompts continue one of the `recent` conversations."""
    capacity, vocab_size = scenario.capacity, scenario.vocab_size
    max_len = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)
    lengths = (
        1,
        rng.randint(1, 6),
        rng.randint(1, 6),
        rng.randint(1, 24),
        rng.randint(1, max(1, max_len // 2)),
        max_len,
    )
    length = min(rng.choice(lengths), scenario.longest_prompt)
    prompt: list[int] = []
    if recent and rng.random() < 0.2:
        prompt += recent[rng.randrange(len(recent))]
    elif scenario.templates and rng.random() < 0.6:
        template = rng.choice(scenario.templates)
        prompt += template[: rng.randint(1, len(template))]
    if scenario.behind and rng.random() < scenario.behind:
        prompt = list(scenario.templates[0])
        length = len(prompt) + rng.randint(1, 8)
    prompt = prompt[:length]
    prompt += [rng.randrange(vocab_size) for _ in range(length - len(prompt))]
    max_tokens = 1 if rng.random() < 0.15 else rng.choice((rng.randint(1, 8), rng.randint(4, 40)))
    if scenario.shortest_answer > 1:
        max_tokens = rng.randint(scenario.shortest_answer, 40)
    if rng.random() < 0.9:
        max_tokens = max(1, min(max_tokens, max_len - length))
    eos = frozenset({0}) if rng.random() < 0.4 else frozenset()
    stop = frozenset({rng.randrange(vocab_size)}) - eos if rng.random() < 0.2 else frozenset()
    deadline = None
    if rng.random() < scenario.deadlines:
        deadline = now + rng.choice((-0.1, 0.0, rng.random() * 0.1, rng.random() * 3))
    request = Request(
        request_id=f"r{rng.randrange(scenario.num_ids) if scenario.num_ids < 1000 else number}",
        prompt=tuple(prompt),
        sampling=Sampling(
            seed=number,
            stop_ids=tuple(sorted(eos | stop)),
            min_tokens=rng.choice((0, 0, 0, rng.randint(1, 8))) if len(eos | stop) < vocab_size else 0,
            logprobs=rng.choice((-1, -1, -1, 0, 2)),
        ),
        max_tokens=max_tokens,
        eos_ids=eos,
        stop_ids=stop,
        priority=rng.choice((128, 128, 0, 3, 255)),
        deadline=deadline,
        cache_salt=rng.choice(scenario.salts),
    )
    if scenario.num_tenants > 1:
        # The first tenant sends about half of all requests.
        tenant = max(0, rng.randrange(2 * scenario.num_tenants) - scenario.num_tenants)
        request = replace(request, tenant=f"t{tenant}")
    model = rng.choice(MODELS) if scenario.updates else MODELS[0]
    if scenario.updates and rng.random() < 0.3:
        request = replace(request, model_fingerprint=fingerprint(model))
    if scenario.resumed and rng.random() < scenario.resumed:
        if scenario.updates:
            request = replace(request, model_fingerprint=fingerprint(model))
        whole = expected(request.prompt, request.sampling, max_tokens, vocab_size, model)
        request = replace(request, output=tuple(whole[: rng.randrange(len(whole))]))
    if scenario.estimated and rng.random() < scenario.estimated:
        request = replace(request, expected_tokens=rng.choice((1, rng.randint(1, request.max_tokens))))
    if scenario.estimated:
        request = replace(request, wants_position=rng.random() < 0.5)
    return request
