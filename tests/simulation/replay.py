"""Print the calls of a seed: `python tests/simulation/replay.py SEED`; check many: `replay.py 0 200000 --check`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.scenario_draw import draw
from simulation.simulated_run import SimulatedRun, run_seed

from lineclear.wire.messages import StepPlan


def show(seed: int) -> int:
    """Print the scenario and the transcript, up to a broken invariant."""
    scenario = draw(seed)
    print(scenario)
    run = SimulatedRun(scenario, checked=True)
    try:
        run.run()
        failure = None
    except Exception as error:
        failure = error
    for now, call, *what in run.scheduler.transcript:
        if call == "plan" and isinstance(what[0], StepPlan):
            plan = what[0]
            print(f"{now:.4f} PLAN {plan.epoch}:{plan.step} zero={plan.zero_blocks} copy={plan.copy_blocks}", end="")
            print(f" states={[tuple(copy) for copy in plan.copy_states]}" if plan.copy_states else "")
            for init in plan.inits:
                seed_, length = init.sampling.seed, len(init.tokens)
                print(f"    init slot {init.slot} request {seed_} tokens {length} blocks {init.blocks}")
            for row in plan.rows:
                sample = f" {row.output.name.lower()}" if row.output else ""
                sample += f" {row.num_drafts} drafts" if row.num_drafts else ""
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
    """Run seeds [first, last) and print those that fail."""
    start, failed = time.perf_counter(), 0
    for seed in range(first, last):
        try:
            run_seed(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{last - first} seeds, {failed} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?", help="with --check: the end of the range, exclusive")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    sys.exit(check(args.seed, args.last or args.seed + 1) if args.check else show(args.seed))
