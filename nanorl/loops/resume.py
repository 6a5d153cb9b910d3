"""Going on with a run exactly where a checkpoint left it: same configuration, same bits."""

from pathlib import Path

import msgspec

from nanorl.config import Config
from nanorl.config_load import to_json
from nanorl.data.prompts import PromptStream, StreamState
from nanorl.errors import CheckpointError, ConfigError
from nanorl.loops.saved import saved_config
from nanorl.models.presets import ResolvedModel
from nanorl.tracking.metrics_file import truncate_metrics
from nanorl.tracking.rollouts import truncate_rollouts
from nanorl.tracking.run_folder import RunFolder, create_run_folder, reopen_run_folder, write_atomically
from nanorl.train.checkpoint import TrainState, checkpoint_path, list_checkpoints, load_checkpoint, read_state
from nanorl.train.trainer import Trainer

SAME = ("model", "data", "reward", "rollout", "algo", "train")
"""Sections that decide numbers: a resumed run keeps them."""


def open_folder(config: Config, model: ResolvedModel) -> tuple[RunFolder, Path | None]:
    """A new run folder; or the resumed run's own, cut back to its checkpoint, and that checkpoint.

    Raises:
        ConfigError: the folder is used and is neither resumed nor overwritten, or was made with other settings.
        CheckpointError: it can't be written, or there is no such checkpoint, or a damaged one.
    """
    if config.run.resume is None:
        overwrite = config.run.overwrite
        folder = create_run_folder(config.run.dir, model.name, overwrite=overwrite, model_path=model.path)
        write_atomically(folder.config, to_json(config))
        return folder, None
    saved = saved_config(config.run.dir)
    differing = [name for name in SAME if getattr(saved, name) != getattr(config, name)]
    if differing or saved.run.seed != config.run.seed:
        raise ConfigError(
            f"{config.run.dir} was made with other settings in {', '.join(differing) or 'run.seed'}: a resumed run "
            "keeps them. Leave them out, or start a new run."
        )
    checkpoint = _choose(config.run.resume, Path(str(saved.run.dir)) / "checkpoints")
    step = read_state(checkpoint).step
    if step >= config.run.steps:
        raise ConfigError(f"The run has done {step} steps already: pass --steps with more than that.")
    folder = reopen_run_folder(Path(str(saved.run.dir)))
    # What was recorded after the checkpoint will be sampled again.
    truncate_metrics(folder.metrics, step)
    truncate_rollouts(folder.rollouts, step)
    going_on = msgspec.structs.replace(config.run, resume=None)  # more steps, perhaps another engine
    write_atomically(folder.config, to_json(msgspec.structs.replace(config, run=going_on)))
    return folder, checkpoint


def restore(checkpoint: Path, trainer: Trainer, prompts: PromptStream) -> TrainState:
    """Puts the trainer and the position in the data back.

    Raises:
        CheckpointError: the checkpoint is of another model or of other data.
    """
    state = load_checkpoint(checkpoint, trainer)
    prompts.load_state_dict(msgspec.convert(state.data, StreamState))
    return state


def _choose(which: str, checkpoints: Path) -> Path:
    available = list_checkpoints(checkpoints)
    step = available[-1] if which == "latest" and available else int(which) if which.isdecimal() else None
    if step is None or step not in available:
        has = f"there are those of steps {', '.join(map(str, available))}" if available else "it has none"
        raise CheckpointError(f"Expected a checkpoint {which!r} in {checkpoints}: {has}.")
    return checkpoint_path(checkpoints, step)
