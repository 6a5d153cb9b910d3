"""`nanorl train`: the synchronous, strictly on-policy loop. The whole of nanorl on one screen."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from nanorl.config import Config
from nanorl.errors import EngineError, WeightSyncError
from nanorl.loops.build import Run, build
from nanorl.loops.evaluate import Accuracy, evaluate
from nanorl.loops.source import Lockstep, Marks, Source
from nanorl.rollout.metrics import rollout_metrics
from nanorl.tracking.view import View
from nanorl.types import Group, Sample, StepReport


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to."""

    reports: tuple[StepReport, ...]
    before: Accuracy | None
    """Held-out accuracy of the model as loaded; None with eval_prompts = 0."""
    after: Accuracy | None


def train(config: Config, view: View) -> TrainResult:
    """Samples, grades, trains and syncs `run.steps` times, in lockstep: every sample is of the current weights.

    Raises:
        NanoRLError: bad input, an engine that died, a sync that did not arrive. Everything started is stopped by then.
    """
    with build(config, view) as run:
        return turn(run, Lockstep(run))


def turn(run: Run, source: Source) -> TrainResult:
    """The loop itself, whatever the source: evaluation, steps, evaluation. Ctrl-C leaves a checkpoint."""
    before = evaluate(run)
    with run.kept_on_interrupt(), run.kept_on_loss():
        reports = tuple(_step(run, source, step) for step in range(run.done_steps + 1, run.config.run.steps + 1))
    result = TrainResult(reports, before, evaluate(run))
    _summarize(result, run.view)
    return result


def _step(run: Run, source: Source, step: int) -> StepReport:
    """One turn of the loop: Prompt -> Group -> gradient -> weight version + 1."""

    def on_progress(done: int, total: int) -> None:
        run.view.progress("training", done, total)
        source.watch()

    start = time.perf_counter()
    groups = source.take(step)
    lost: EngineError | WeightSyncError | None = None
    with run.whole_step():
        sampled = trained = time.perf_counter()
        metrics = rollout_metrics(groups)
        if not run.config.run.rollout_only:
            metrics |= run.trainer.step(trainable(groups), on_progress, run.version)
            trained = time.perf_counter()
            try:
                metrics |= source.sync().metrics()
            except (EngineError, WeightSyncError) as error:
                lost = error  # the step is trained all the same: it is logged, and kept, before the run ends
        marks = Marks(start, sampled, trained, time.perf_counter())
        metrics |= source.metrics(marks) | marks.metrics() | {"engine/num_restarts": run.recovery.num_restarts}
        every = run.config.run.eval_every
        accuracy = evaluate(run) if every and step % every == 0 and lost is None else None
        metrics |= accuracy.metrics() if accuracy else {}
        report = StepReport(step=step, weight_version=run.version, metrics=metrics)
        run.log(report, groups)
    if lost is not None:
        raise lost
    return report


def trainable(groups: Sequence[Group]) -> list[Sample]:
    """The samples that train. A group with fewer than two valid members has nothing to compare: it is dropped."""
    return [sample for group in groups if len(group.valid) >= 2 for sample in group.valid]


def _summarize(result: TrainResult, view: View) -> None:
    """Early and late means, and the held-out problems before and after."""
    third = max(1, len(result.reports) // 3)
    early, late = result.reports[:third], result.reports[-third:]
    rows = [
        (title, _mean(early, metric), _mean(late, metric))
        for title, metric in (
            ("reward", "rollout/reward/mean"),
            ("accuracy, sampled", "rollout/correct/mean"),
            ("format, sampled", "rollout/format/mean"),
            ("step s", "time/step_s"),
        )
    ]
    if result.before and result.after:
        rows.append(
            (
                f"accuracy, {result.before.num_prompts} held-out",
                result.before.text("correct"),
                result.after.text("correct"),
            )
        )
        rows.append(
            (f"format, {result.before.num_prompts} held-out", result.before.text("format"), result.after.text("format"))
        )
    view.table("Summary (held-out: before training, after)", ("", _span(early), _span(late)), rows)


def _span(reports: tuple[StepReport, ...]) -> str:
    first, last = reports[0].step, reports[-1].step
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _mean(reports: tuple[StepReport, ...], metric: str) -> str:
    values = [report.metrics[metric] for report in reports if metric in report.metrics]
    return f"{sum(values) / len(values):.3f}" if values else "-"
