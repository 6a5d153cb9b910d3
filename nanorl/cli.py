"""The command line: each command parses, builds a config and calls one function. Nothing heavy is imported here."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import nanorl
from nanorl.errors import NanoRLError
from nanorl.options import (
    KEYS,
    CheckpointEvery,
    Colocate,
    ConfigFile,
    EngineKind,
    EngineUrl,
    EvalEvery,
    GroupSize,
    LearningRate,
    MaxNewTokens,
    Model,
    Overwrite,
    PromptsPerStep,
    Quiet,
    Resume,
    RunDir,
    Seed,
    Set,
    Steps,
    TakeOver,
    Temperature,
    fill_in_resume,
)

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
    colocate: Colocate = None,
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
        with _importing(view):
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
        with _importing(view):
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
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ENGINE FLAGS]", help="Further flags of the engine, after --.")
    ] = None,
) -> None:
    """Serve a model until Ctrl-C; other commands on this machine find it."""
    further = {"engine.flags": shlex.join(flags)} if flags else {}
    resolved = _load(config, set_, _engine_flags(model, engine, None, None) | further)
    with _view(quiet=quiet) as view:
        with _importing(view):
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
        with _importing(view):
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
        with _importing(view):
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
        with _importing(view):
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
    temperature: Annotated[float | None, typer.Option(help="Of the samples; 0: only the greedy answer.")] = None,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="Only one JSON object, for machines.")] = False,
    config: ConfigFile = None,
    set_: Set = None,
) -> None:
    """Answer held-out prompts: greedy, avg@k and pass@k with 95 % confidence intervals."""
    flags = {"run.eval_prompts": prompts, "run.seed": seed, "rollout.temperature": temperature or None}
    resolved = _load(config, set_, flags | _engine_flags(model, engine, engine_url, take_over))
    with _view(quiet=json) as view:
        with _importing(view):
            from nanorl.loops import evaluate as loop

        scores = loop.evaluate_model(resolved, view, num_samples=0 if temperature == 0 else samples)
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
        from nanorl.loops.saved import replayed_config, saved_config

        base = saved_config(flags["run_dir"]) if flags["resume"] else replayed_config(str(flags["replay"]))
    values["run.dir"] = None if flags["resume"] else flags["run_dir"]  # the base has it
    return _load(flags["config"], flags["set_"], values, base)


def _load(config: Path | None, sets: list[str] | None, flags: dict[str, Any], base: "Config | None" = None) -> "Config":
    from nanorl.config_load import load_config

    return load_config(config, sets or (), flags, base)


@contextlib.contextmanager
def _importing(view: "View") -> Iterator[None]:
    """Around torch and transformers: a signal ends the process at once, while there is nothing to stop but the view.

    Both catch what they should not while they load, KeyboardInterrupt too: Ctrl-C would be lost, or become a traceback.
    """

    def end(number: int, _: FrameType | None) -> None:
        view.__exit__(None, None, None)  # the terminal's cursor
        os._exit(128 + number)

    _handle_signals(end)
    view.progress("importing torch", 0, 0)
    yield
    _handle_signals(_on_signal)


def _view(*, quiet: bool = False) -> "View":
    from nanorl.tracking.view import make_view

    return make_view(quiet=quiet)


def _engine_flags(model: str | None, engine: str | None, url: str | None, take_over: bool | None) -> dict[str, Any]:
    return {"model.name": model, "engine.type": engine, "engine.url": url, "engine.take_over": take_over}


def main() -> None:
    """The command `nanorl`: runs what it was given and ends the process.

    Everything is stopped by then. Tearing down an interpreter with torch in it would take another second.
    """
    try:
        run_command()
    except SystemExit as ending:
        if "torch" not in sys.modules:
            raise
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads any more
                stream.flush()
        os._exit(ending.code if isinstance(ending.code, int) else int(ending.code is not None))


def run_command() -> None:
    """Runs the command in sys.argv; what nanorl raises on purpose becomes one message and exit code 2."""
    _received.clear()
    _handle_signals(_on_signal)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal without Unicode shows `?`; it must not end a run
    # OpenMP threads spin while they wait: by default so long that it makes the engine's steps ten times slower where
    # cores are short; not at all, and a small model's take half as long again. GNU's reads the number (some 0.1 ms).
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _run_app()
    except NanoRLError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # `nanorl show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:  # a full disk or a missing right, wherever it shows
        typer.echo(": ".join(filter(None, ("error", error.strerror or str(error), error.filename))), err=True)
        sys.exit(2)


def _run_app() -> None:
    try:
        app(fill_in_resume(sys.argv[1:]), standalone_mode=True)
    except Exception:
        if _received:  # a library took the interrupt for a fault of its own
            sys.exit(128 + _received[0])
        raise


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, handler)


_received: list[int] = []
"""Signals that asked this process to end."""


def _on_signal(number: int, _: FrameType | None) -> None:
    """Unwinds, so that every context manager stops what it started."""
    _received.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
