"""Shows what happened in a seed, call by call: `python tests/simulation/replay.py SEED`. `--check` only says whether it
holds, for a range: `replay.py 0 200000 --check`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.scenario import draw
from simulation.world import World, run_seed

from lineclear.wire.messages import StepPlan


def show(seed: int) -> int:
    """Print the scenario and the transcript up to the breach, if there is one."""
    scenario = draw(seed)
    print(scenario)
    world = World(scenario, watch=True)
    try:
        world.run()
        failure = None
    except Exception as error:
        failure = error
    for now, call, *what in world.scheduler.transcript:
        if call == "plan" and isinstance(what[0], StepPlan):
            plan = what[0]
            print(f"{now:.4f} PLAN {plan.epoch}:{plan.step} zero={plan.zero_blocks}")
            for init in plan.inits:
                number, length = init.sampling.seed, len(init.tokens)
                print(f"    init slot {init.slot} number {number} tokens {length} blocks {init.blocks}")
            for row in plan.rows:
                sample = " sample" if row.sample else ""
                print(f"    row  slot {row.slot} [{row.start}, {row.start + row.num_tokens}){sample} +{row.new_blocks}")
        else:
            print(f"{now:.4f} {call}", *what)
    if failure is not None:
        print(f"\nseed {seed}: {type(failure).__name__}: {failure}")
        return 1
    run_seed(seed)
    print(f"\nseed {seed} holds")
    return 0


def check(first: int, last: int) -> int:
    """Run seeds [first, last) and name those that do not hold."""
    begin, failed = time.perf_counter(), 0
    for seed in range(first, last):
        try:
            run_seed(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{last - first} seeds, {failed} failed, {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?", help="with --check: up to and without this seed")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    sys.exit(check(args.seed, args.last or args.seed + 1) if args.check else show(args.seed))
