"""The command line: each command parses, builds a config and calls one function. Nothing heavy is imported here."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import nanorl
from nanorl.errors import NanoRLError

if TYPE_CHECKING:
    from nanorl.config import Config
    from nanorl.tracking.view import View

app = typer.Typer(
    name="nanorl",
    help="RL post-training for language models: sample, grade, train, sync the weights, and again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich's Markdown costs --help half its time
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
}
"""Flag of the training commands -> config key."""


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"nanorl {nanorl.__version__}")
        raise typer.Exit


@app.command()
def train(
    steps: Steps = None,
    model: Model = None,
    engine: EngineKind = None,
    engine_url: EngineUrl = None,
    take_over: TakeOver = None,
    prompts_per_step: PromptsPerStep = None,
    group_size: GroupSize = None,
    lr: LearningRate = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = None,
    resume: Resume = None,
    checkpoint_every: CheckpointEvery = None,
    eval_every: EvalEvery = None,
    rollout_only: Annotated[
        bool | None, typer.Option("--rollout-only", help="Sample and grade, train nothing.")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(metavar="RUN", help="Train on that run's recorded rollouts, without an engine.")
    ] = None,
    config: ConfigFile = None,
    set_: Set = None,
    quiet: Quiet = False,
) -> None:
    """Train with the synchronous on-policy loop; without arguments: the tiny model learns arithmetic."""
    resolved = _load_training(locals())
    with _view(quiet=quiet) as view:
        view.progress("importing torch", 0, 0)
        if resolved.run.replay:
            from nanorl.loops.replay import replay as run
        else:
            from nanorl.loops.train import train as run

        run(resolved, view)


@app.command("train-async")
def train_async(
    max_staleness: Annotated[
        int | None, typer.Option(help="Syncs between the weights that sample and those that train; 0: as train.")
    ] = None,
    stale: Annotated[
        str | None, typer.Option(metavar="drop|recycle", help="What happens to a group that got too old.")
    ] = None,
    in_flight_update: Annotated[
        str | None,
        typer.Option(metavar="retract|in-place|drain", help="What happens to running requests during a sync."),
    ] = None,
    steps: Steps = None,
    model: Model = None,
    engine: EngineKind = None,
    engine_url: EngineUrl = None,
    take_over: TakeOver = None,
    prompts_per_step: PromptsPerStep = None,
    group_size: GroupSize = None,
    lr: LearningRate = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = None,
    resume: Resume = None,
    checkpoint_every: CheckpointEvery = None,
    eval_every: EvalEvery = None,
    config: ConfigFile = None,
    set_: Set = None,
    quiet: Quiet = False,
) -> None:
    """Train while the engine samples ahead, within a bound on staleness; takes what train takes."""
    resolved = _load_training(locals())
    with _view(quiet=quiet) as view:
        view.progress("importing torch", 0, 0)
        from nanorl.loops.train_async import train_async as run

        run(resolved, view)


@app.command()
def serve(
    model: Model = None,
    engine: EngineKind = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 30000,
    config: ConfigFile = None,
    set_: Set = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model until Ctrl-C; other commands on this machine find it."""
    resolved = _load(config, set_, _engine_flags(model, engine, None, None))
    with _view(quiet=quiet) as view:
        from nanorl.loops.serve import serve as run

        run(resolved, port, view)


@app.command("check-parity")
def check_parity(
    model: Model = None,
    engine: EngineKind = None,
    engine_url: EngineUrl = None,
    take_over: TakeOver = None,
    prompts: Annotated[int, typer.Option(help="Prompts to answer, before and after the step.")] = 16,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature, above 0.")] = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Set = None,
) -> None:
    """Compare trainer and engine logprobs, before and after a real step and sync; exit code 1 beyond the gate."""
    flags = {"run.seed": seed, "rollout.prompts_per_step": prompts, "rollout.temperature": temperature}
    resolved = _load(config, set_, flags | _engine_flags(model, engine, engine_url, take_over))
    with _view() as view:
        from nanorl.loops.parity import check_parity as run

        result = run(resolved, view)
    raise typer.Exit(0 if result.holds else 1)


@app.command("probe-tito")
def probe_tito(
    model: Model = None,
    engine: EngineKind = None,
    engine_url: EngineUrl = None,
    take_over: TakeOver = None,
    no_engine: Annotated[
        bool, typer.Option("--no-engine", help="Only tokenizer and template; needs no weights.")
    ] = False,
    template: Annotated[
        Path | None, typer.Option("--template", help="Try this chat template instead of the model's.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of each kind.")] = 256,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Set = None,
) -> None:
    """Check that trained tokens are the sampled ones: tokenizer, template, batch, engine; exit code 1 if unsafe."""
    resolved = _load(config, set_, {"run.seed": seed, **_engine_flags(model, engine, engine_url, take_over)})
    with _view() as view:
        from nanorl.loops.probe import probe_tito as run

        result = run(resolved, view, num_samples=samples, use_engine=not no_engine, template_file=template)
    raise typer.Exit(result.exit_code)


@app.command("sync-bench")
def sync_bench(
    iters: Annotated[int, typer.Option(min=1, help="Syncs a carrier.")] = 50,
    model: Model = None,
    engine: EngineKind = None,
    engine_url: EngineUrl = None,
    take_over: TakeOver = None,
    json: Annotated[bool, typer.Option("--json", help="Only one JSON object, for machines.")] = False,
    config: ConfigFile = None,
    set_: Set = None,
) -> None:
    """Time the weight sync, part by part, over every carrier that reaches the engine."""
    resolved = _load(config, set_, _engine_flags(model, engine, engine_url, take_over))
    with _view(quiet=json) as view:
        from nanorl.loops import sync_bench as bench

        results = bench.sync_bench(resolved, view, iters=iters)
        if not json:
            bench.show(results, view)
    if json:
        typer.echo(bench.as_json(results))


@app.command("eval")
def evaluate(
    model: Model = None,
    engine: EngineKind = None,
    engine_url: EngineUrl = None,
    take_over: TakeOver = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts, as many as there are.")] = 256,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Samples a prompt, for pass@k.")] = 8,
    temperature: Annotated[float | None, typer.Option(help="Of the samples; the greedy answer comes besides.")] = None,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="Only one JSON object, for machines.")] = False,
    config: ConfigFile = None,
    set_: Set = None,
) -> None:
    """Answer held-out prompts: greedy, avg@k and pass@k with 95 % confidence intervals."""
    flags = {"run.eval_prompts": prompts, "run.seed": seed, "rollout.temperature": temperature}
    resolved = _load(config, set_, flags | _engine_flags(model, engine, engine_url, take_over))
    with _view(quiet=json) as view:
        from nanorl.loops import evaluate as loop

        scores = loop.evaluate_model(resolved, view, num_samples=samples)
        if not json:
            loop.show(scores, view)
    if json:
        typer.echo(loop.as_json(scores))


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="Run folder, name in runs/, or latest.")] = "latest",
    step: Annotated[int | None, typer.Option(help="Default: the last.")] = None,
    worst: Annotated[int | None, typer.Option(metavar="K", help="The K samples of lowest reward.")] = None,
) -> None:
    """Read what the policy wrote, token by token."""
    from nanorl.loops.show import show as run_show

    run_show(run, step, worst)


@app.command()
def plot(
    runs: Annotated[list[str] | None, typer.Argument(help="One or several runs; default: latest.")] = None,
    out: Annotated[Path | None, typer.Option(help="PNG; default RUN/curves.png.")] = None,
) -> None:
    """Draw the curves of one or several runs as a PNG."""
    from nanorl.loops.plot import plot as run_plot

    typer.echo(f"wrote {run_plot(runs or ['latest'], out)}")


def _load_training(flags: dict[str, Any]) -> "Config":
    """The configuration of a training command, from its arguments by name."""
    values = {key: flags[name] for name, key in KEYS.items() if name in flags}
    base = None
    if flags["resume"] or flags.get("replay"):
        from nanorl.loops.resume import replayed_config, saved_config

        base = saved_config(flags["run_dir"]) if flags["resume"] else replayed_config(str(flags["replay"]))
    if flags["resume"]:
        values["run.dir"] = None  # the base has it
    return _load(flags["config"], flags["set_"], values, base)


def _load(config: Path | None, sets: list[str] | None, flags: dict[str, Any], base: "Config | None" = None) -> "Config":
    from nanorl.config import load_config

    return load_config(config, sets or (), flags, base)


def _fill_in_resume(argv: list[str]) -> list[str]:
    """`--resume` without a step means the newest checkpoint; Typer knows no options with an optional value."""
    filled = list(argv)
    for i, word in enumerate(argv):
        if word == "--resume" and not (i + 1 < len(argv) and (argv[i + 1].isdecimal() or argv[i + 1] == "latest")):
            filled[i] = "--resume=latest"
    return filled


def _view(*, quiet: bool = False) -> "View":
    from nanorl.tracking.view import make_view

    return make_view(quiet=quiet)


def _engine_flags(model: str | None, engine: str | None, url: str | None, take_over: bool | None) -> dict[str, Any]:
    return {"model.name": model, "engine.type": engine, "engine.url": url, "engine.take_over": take_over}


def main() -> None:
    """Runs a command; what nanorl raises on purpose becomes one message and exit code 2."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    # Trainer and engine share the cores by turns. OpenMP threads spin while they wait: by default so long that one
    # side's spinning makes the other's steps ten times slower once a third process wants a core; not at all, and a
    # small model's steps take half as long again. This is some 0.1 ms. GNU's OpenMP reads the number, others the word.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(_fill_in_resume(sys.argv[1:]), standalone_mode=True)
    except NanoRLError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # `nanorl show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:  # a full disk or a missing right, wherever it shows
        typer.echo(f"error: {error.strerror or error}: {error.filename or 'no file named'}", err=True)
        sys.exit(2)


def _on_sigterm(signum: int, _: FrameType | None) -> None:
    """Unwinds like Ctrl-C does, so that every context manager stops what it started."""
    sys.exit(128 + signum)
