"""Asynchronous against synchronous on the tiny model, where a grader takes 200 ms a sample: wall time and accuracy."""

import argparse
import os
from pathlib import Path
from statistics import median

from measure import Measured, steps_s, train


def main() -> None:
    """Prints a line a run, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--graders", type=int, default=48, help="samples graded at once")
    parser.add_argument("--max-staleness", type=int, default=2)
    arguments = parser.parse_args()
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    common = ["--steps", str(arguments.steps), "--prompts-per-step", "32", "--eval-every", str(arguments.steps)]
    settings = ["reward.name=slow_reward:grade", f"reward.num_workers={arguments.graders}", "run.checkpoint_every=0"]
    common += [word for setting in settings for word in ("--set", setting)]
    overlapped = ["--max-staleness", str(arguments.max_staleness), "--set", "algo.correction=tis"]
    shares: list[float] = []
    for seed in range(arguments.seeds):
        synchronous = train([*common, "--seed", str(seed)], env)
        asynchronous = train([*common, *overlapped, "--seed", str(seed)], env, "train-async")
        shares.append(steps_s(asynchronous) / steps_s(synchronous))
        show(f"seed {seed} train", synchronous)
        show(f"seed {seed} train-async", asynchronous)
        print(f"seed {seed}: train-async took {shares[-1]:.2f} of the time", flush=True)
    print(f"median: {median(shares):.2f} of the time")


def show(title: str, run: Measured) -> None:
    """One line."""
    oldest = max(step.get("rollout/staleness/max", 0) for step in run.steps)
    print(
        f"{title}: {steps_s(run):.1f} s in steps, step {run.median_of('time/step_s'):.2f} s, held-out accuracy "
        f"{run.steps[-1]['eval/correct/mean']:.3f}, sampled in the last 5 steps "
        f"{median(step['rollout/correct/mean'] for step in run.steps[-5:]):.3f}, highest staleness {oldest:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
