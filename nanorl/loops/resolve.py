"""From the configuration as asked for to the one that runs: the model found, every open field filled."""

import msgspec
import torch

from nanorl.config import Config
from nanorl.errors import ConfigError
from nanorl.models.presets import Preset, Progress, ResolvedModel, resolve_model


def resolve(config: Config, on_progress: Progress = lambda what, done, total: None) -> tuple[Config, ResolvedModel]:
    """The configuration with nothing left open, and the model it trains.

    Raises:
        ConfigError: a GPU is asked for and there is none, or more minibatches than samples.
        ModelError: the model can't be had.
    """
    device = _device(config)
    model = resolve_model(config.model.name, has_gpu=device == "cuda", on_progress=on_progress)
    return _fill(config, model.preset, device), model


def _device(config: Config) -> str:
    has_gpu = torch.cuda.is_available()
    if config.model.device == "cuda" and not has_gpu:
        raise ConfigError("model.device is cuda, but torch sees no GPU here. Use auto or cpu.")
    return ("cuda" if has_gpu else "cpu") if config.model.device == "auto" else config.model.device


def _fill(config: Config, preset: Preset, device: str) -> Config:
    """None takes the preset's value. Raises: ConfigError where the whole makes no sense."""
    replace = msgspec.structs.replace
    max_new_tokens = config.rollout.max_new_tokens or preset.max_new_tokens
    prompts_per_step = config.rollout.prompts_per_step or preset.prompts_per_step
    group_size = config.rollout.group_size or preset.group_size
    num_samples = prompts_per_step * group_size
    if (config.train.num_minibatches or 1) > num_samples:
        raise ConfigError(
            f"train.num_minibatches is {config.train.num_minibatches}, but a step has {num_samples} samples "
            f"({prompts_per_step} prompts x {group_size}): some minibatches would always be empty."
        )
    return replace(
        config,
        model=replace(config.model, dtype=config.model.dtype or preset.dtype, device=device),
        rollout=replace(
            config.rollout,
            prompts_per_step=prompts_per_step,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
        ),
        algo=replace(config.algo, constant_length=config.algo.constant_length or max_new_tokens),
        train=replace(
            config.train,
            lr=config.train.lr or preset.lr,
            num_minibatches=config.train.num_minibatches or min(preset.num_minibatches, num_samples),
        ),
    )
