"""One step of a real 135 M model on this machine: 4 prompts x 6 samples x 48 tokens."""

import argparse
from pathlib import Path

from measure import train
from tiny import show


def main() -> None:
    """Prints a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    # Its answers to the built-in task are all wrong at first: a reward with a spread makes every sample train.
    sets = ["run.eval_prompts=0", "reward.name=smollm2:short_text", "run.checkpoint_every=0"]
    flags = [word for setting in sets for word in ("--set", setting)]
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    show("SmolLM2-135M", train(["--model", arguments.model, "--steps", str(arguments.steps), *flags], env))


def short_text(_prompt: object, text: str, _finish_reason: str) -> float:
    """A reward that differs within every group."""
    return -len(text) / 100


if __name__ == "__main__":
    main()
