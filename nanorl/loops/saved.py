"""Configurations of earlier runs, read before anything heavy is imported: a mistyped name is refused at once."""

import msgspec

from nanorl.config import Config
from nanorl.config_load import from_json
from nanorl.errors import CheckpointError, ConfigError
from nanorl.tracking.rollouts import rollout_steps
from nanorl.tracking.run_folder import find_run


def saved_config(run_dir: str | None) -> Config:
    """The resolved configuration of an earlier run, its folder filled in; `runs/latest` where none is named.

    Raises:
        CheckpointError: there is no such run.
        ConfigError: its configuration is not of this version.
    """
    folder = find_run(run_dir or "latest")
    try:
        config = from_json(folder.config.read_bytes())
    except OSError as error:
        raise CheckpointError(f"Expected the configuration of a run in {folder.config}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{folder.config} is not of this version of nanorl or damaged: {error}") from None
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(folder.path.resolve())))


def replayed_config(run: str) -> Config:
    """The base of `--replay`: the same settings, in a new folder.

    Raises:
        CheckpointError: there is no such run, or it recorded no rollouts from step 1 on.
    """
    config = saved_config(run)
    source = find_run(run)
    steps = rollout_steps(source.rollouts)
    if steps[:1] != [1]:
        raise CheckpointError(f"Expected recorded rollouts from step 1 on in {source.rollouts}, got steps {steps[:3]}.")
    section = config.run
    changed = msgspec.structs.replace(
        section, dir=None, resume=None, overwrite=False, rollout_only=False, replay=section.dir
    )
    return msgspec.structs.replace(config, run=changed)
