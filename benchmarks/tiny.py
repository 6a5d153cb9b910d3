"""The tiny model's figures: cold and warm `nanorl train --steps 6`, and accuracy over seeds."""

import argparse
import tempfile
from statistics import median

from measure import Measured, train


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cold", action="store_true", help="also once from an empty model cache")
    arguments = parser.parse_args()
    steps = ["--steps", str(arguments.steps)]
    if arguments.cold:
        with tempfile.TemporaryDirectory() as cache:
            show("cold cache", train(steps, {"XDG_CACHE_HOME": cache}))
    runs = [
        train([*steps, "--seed", str(seed), "--eval-every", str(arguments.steps)]) for seed in range(arguments.seeds)
    ]
    for seed, run in enumerate(runs):
        show(f"seed {seed}", run)
    heldout = [run.steps[-1]["eval/correct/mean"] for run in runs]
    form = [run.steps[-1]["eval/format/mean"] for run in runs]
    late = [median(step["rollout/correct/mean"] for step in run.steps[-5:]) for run in runs]
    print(
        f"held-out accuracy: median {median(heldout):.3f}, lowest {min(heldout):.3f}; format: median {median(form):.3f}"
    )
    print(f"accuracy sampled in the last 5 steps: median {median(late):.3f}, lowest {min(late):.3f}")


def show(title: str, run: Measured) -> None:
    """One line."""
    print(
        f"{title}: {run.wall_s:.1f} s, step {run.median_of('time/step_s'):.2f} s "
        f"(rollout {run.median_of('time/rollout_s'):.2f}, "
        f"train {run.median_of('time/train_s'):.2f}, sync {run.median_of('time/sync_s'):.3f}), "
        f"{run.median_of('rollout/tokens_per_s'):,.0f} tokens/s, peak {run.peak_mb:,.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
