"""Async against sync on the tiny model, where a grader takes 200 ms a sample: time to the same accuracy."""

import argparse
import os
from math import inf
from pathlib import Path
from statistics import fmean, median

from measure import Measured, steps_s, train


def main() -> None:
    """Prints a line a run, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accuracy", type=float, default=0.85, help="to be reached by the samples of three steps")
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
        times = [time_to(run, arguments.accuracy) for run in (synchronous, asynchronous)]
        shares.append(times[1] / times[0])
        show(f"seed {seed} train      ", synchronous, times[0])
        show(f"seed {seed} train-async", asynchronous, times[1])
    print(f"to accuracy {arguments.accuracy:g} train-async took {median(shares):.2f} of the time, median over seeds")


def time_to(run: Measured, accuracy: float) -> float:
    """Seconds in steps until the mean sampled accuracy of three steps in a row reached it."""
    for i in range(2, len(run.steps)):
        if fmean(step["rollout/correct/mean"] for step in run.steps[i - 2 : i + 1]) >= accuracy:
            return sum(step["time/step_s"] for step in run.steps[: i + 1])
    return inf


def show(title: str, run: Measured, reached_s: float) -> None:
    """One line."""
    oldest = max(step.get("rollout/staleness/max", 0) for step in run.steps)
    print(
        f"{title}: accuracy reached after {reached_s:.1f} s; {len(run.steps)} steps in {steps_s(run):.1f} s, median "
        f"{run.median_of('time/step_s'):.2f} s; held-out accuracy {run.steps[-1]['eval/correct/mean']:.3f}; highest "
        f"staleness {oldest:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
