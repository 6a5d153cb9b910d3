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
    parser.add_argument("--more", type=float, default=0.25, help="share of steps that train-async makes besides")
    parser.add_argument("--graders", type=int, default=48, help="samples graded at once")
    parser.add_argument("--max-staleness", type=int, default=2)
    arguments = parser.parse_args()
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    common = ["--prompts-per-step", "32"]
    settings = ["reward.name=slow_reward:grade", f"reward.num_workers={arguments.graders}", "run.checkpoint_every=0"]
    common += [word for setting in settings for word in ("--set", setting)]
    overlapped = ["--max-staleness", str(arguments.max_staleness), "--set", "algo.correction=tis"]
    more = round(arguments.steps * (1.0 + arguments.more))
    shares: list[float] = []
    accuracies: list[tuple[float, float]] = []
    for seed in range(arguments.seeds):
        synchronous = train([*common, *steps(arguments.steps), "--seed", str(seed)], env)
        asynchronous = train([*common, *overlapped, *steps(more), "--seed", str(seed)], env, "train-async")
        accuracies.append((heldout(synchronous), heldout(asynchronous)))
        shares.append(steps_s(asynchronous) / steps_s(synchronous))
        show(f"seed {seed} train", synchronous)
        show(f"seed {seed} train-async", asynchronous)
        print(f"seed {seed}: train-async took {shares[-1]:.2f} of the time", flush=True)
    before, after = (median(pair) for pair in zip(*accuracies, strict=True))
    print(f"median: {median(shares):.2f} of the time; held-out accuracy {before:.3f} train, {after:.3f} train-async")


def steps(number: int) -> list[str]:
    """So many, with an evaluation after the last."""
    return ["--steps", str(number), "--eval-every", str(number)]


def heldout(run: Measured) -> float:
    """Accuracy after the last step."""
    return run.steps[-1]["eval/correct/mean"]


def show(title: str, run: Measured) -> None:
    """One line."""
    oldest = max(step.get("rollout/staleness/max", 0) for step in run.steps)
    print(
        f"{title}: {steps_s(run):.1f} s in steps, step {run.median_of('time/step_s'):.2f} s, held-out accuracy "
        f"{heldout(run):.3f}, sampled in the last 5 steps "
        f"{median(step['rollout/correct/mean'] for step in run.steps[-5:]):.3f}, highest staleness {oldest:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
