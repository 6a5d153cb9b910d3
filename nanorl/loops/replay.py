"""`nanorl train --replay RUN`: the recorded rollouts of a run, trained on again, without an engine.

With the same settings the losses are the same to the bit; with others it shows what those make of exactly the
same samples.
"""

import time

from nanorl.config import Config
from nanorl.errors import CheckpointError
from nanorl.loops.build import make_trainer
from nanorl.loops.recorder import Recorder
from nanorl.loops.resolve import resolve
from nanorl.loops.resume import open_folder
from nanorl.loops.train import trainable
from nanorl.rollout.metrics import rollout_metrics
from nanorl.tokens.chat import load_chat
from nanorl.tracking.metrics_file import read_metrics
from nanorl.tracking.rollouts import read_rollouts, rollout_steps
from nanorl.tracking.run_folder import find_run
from nanorl.tracking.view import View
from nanorl.types import StepReport


def replay(config: Config, view: View) -> list[StepReport]:
    """Trains on the rollouts of `run.replay`, step by step, and compares the losses with those recorded.

    Raises:
        CheckpointError: the run has no rollouts from step 1 on.
        NanoRLError: bad input.
    """
    source = find_run(str(config.run.replay))
    steps = rollout_steps(source.rollouts)[: config.run.steps]
    if not steps or steps != list(range(1, len(steps) + 1)):
        raise CheckpointError(f"Expected recorded rollouts from step 1 on in {source.rollouts}, got steps {steps[:3]}.")
    config, model = resolve(config, view.progress)
    folder, _ = open_folder(config, model)
    with folder:
        recorder = Recorder(config, folder, load_chat(model.path), view)
        trainer = make_trainer(config, model, folder)
        folder.keep()
        device, dtype = str(trainer.policy.device), str(config.model.dtype)
        view.header(
            {
                "model": model.name,
                "replays": str(source.path),
                "device": device,
                "dtype": dtype,
                "run": str(folder.path),
            }
        )
        reports: list[StepReport] = []
        try:
            for step in steps:
                start = time.perf_counter()
                groups = [record.group for record in read_rollouts(source.rollouts, step)]
                metrics = trainer.step(trainable(groups)) | rollout_metrics(groups)
                metrics["time/step_s"] = time.perf_counter() - start
                reports.append(StepReport(step=step, weight_version=0, metrics=metrics))
                recorder.log(reports[-1], groups)
        finally:
            recorder.close()
    recorded = {report.step: report.metrics.get("train/pg_loss") for report in read_metrics(source.metrics)}
    same = sum(report.metrics["train/pg_loss"] == recorded.get(report.step) for report in reports)
    view.note(f"{same} of {len(reports)} losses are the recorded ones to the bit")
    return reports
