"""The flags that several commands share, and the configuration keys that they set."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Option("--model", "-m", help="auto, tiny, a Hugging Face id or a folder.")]
EngineKind = Annotated[str | None, typer.Option("--engine", help="auto, torch (embedded) or sglang.")]
EngineUrl = Annotated[
    str | None, typer.Option("--engine-url", help="Use a running server, e.g. http://127.0.0.1:30000.")
]
TakeOver = Annotated[bool | None, typer.Option("--take-over", help="Use a server although another run holds it.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with one table a section.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any config key; may be repeated.")
]
Colocate = Annotated[
    bool | None, typer.Option("--colocate", help="Lend SGLang's GPU memory to the trainer while it trains.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Decides prompts, sampling noise and minibatches.")]
RunDir = Annotated[str | None, typer.Option("--run-dir", help="Run folder; default runs/<time>-<model>.")]
Overwrite = Annotated[
    bool | None, typer.Option("--overwrite", help="Delete what an earlier run left in the run folder.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the final table.")]


Steps = Annotated[int | None, typer.Option("--steps", "-n", help="Loop steps.")]
PromptsPerStep = Annotated[int | None, typer.Option(help="Prompts a step.")]
GroupSize = Annotated[int | None, typer.Option(help="Samples a prompt.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Budget of one response.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature, above 0.")]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="[STEP]", help="Go on in --run-dir from its newest, or that, checkpoint."),
]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: none.")]
EvalEvery = Annotated[int | None, typer.Option(help="Steps between evaluations; 0: none.")]

KEYS = {
    "steps": "run.steps",
    "seed": "run.seed",
    "run_dir": "run.dir",
    "overwrite": "run.overwrite",
    "resume": "run.resume",
    "checkpoint_every": "run.checkpoint_every",
    "eval_every": "run.eval_every",
    "rollout_only": "run.rollout_only",
    "prompts_per_step": "rollout.prompts_per_step",
    "group_size": "rollout.group_size",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "lr": "train.lr",
    "max_staleness": "overlap.max_staleness",
    "stale": "overlap.stale",
    "in_flight_update": "overlap.in_flight_update",
    "model": "model.name",
    "engine": "engine.type",
    "engine_url": "engine.url",
    "take_over": "engine.take_over",
    "colocate": "engine.colocate",
}
"""Flag of the training commands -> config key."""


def fill_in_resume(argv: list[str]) -> list[str]:
    """`--resume` without a step means the newest checkpoint; Typer knows no options with an optional value."""
    filled = list(argv)
    for i, word in enumerate(argv):
        if word == "--resume" and not (i + 1 < len(argv) and (argv[i + 1].isdecimal() or argv[i + 1] == "latest")):
            filled[i] = "--resume=latest"
    return filled
