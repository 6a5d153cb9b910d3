"""Samples four syncs old on the tiny model: the plain ratio against the decoupled correction, over the same seeds."""

import argparse
from statistics import fmean, median

from measure import Measured, train

SPAN = 5
"""Steps averaged to one point of a curve."""
CORRECTIONS = {"plain": [], "decoupled, tis": ["--set", "algo.correction=tis"]}


def main() -> None:
    """Prints the median curves over seeds side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", default="6e-4")
    arguments = parser.parse_args()
    common = ["--steps", str(arguments.steps), "--prompts-per-step", "32", "--max-staleness", "4", "--lr", arguments.lr]
    common += ["--eval-every", str(arguments.steps), "--set", "run.checkpoint_every=0"]
    runs = {
        name: [train([*common, *more, "--seed", str(seed)], loop="train-async") for seed in range(arguments.seeds)]
        for name, more in CORRECTIONS.items()
    }
    print("steps    " + "".join(name.rjust(18) for name in runs) + "   sampled accuracy, median over seeds")
    for start in range(0, arguments.steps, SPAN):
        points = [median(point(run, start) for run in of_name) for of_name in runs.values()]
        print(f"{start + 1:>3}-{start + SPAN:<5}" + "".join(f"{value:.3f}".rjust(18) for value in points))
    for name, of_name in runs.items():
        heldout = " ".join(f"{run.steps[-1]['eval/correct/mean']:.3f}" for run in of_name)
        staleness = fmean(run.median_of("rollout/staleness/mean") for run in of_name)
        drift = fmean(run.median_of("train/drift/mean") for run in of_name)
        print(f"{name}: held-out {heldout}, staleness {staleness:.1f}, drift {drift:.3f} nats")


def point(run: Measured, start: int) -> float:
    """Mean accuracy of the samples of SPAN steps."""
    return fmean(step["rollout/correct/mean"] for step in run.steps[start : start + SPAN])


if __name__ == "__main__":
    main()
