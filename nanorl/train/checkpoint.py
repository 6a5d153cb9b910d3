"""Checkpoints: a Hugging Face folder with the optimizer beside it, whole or not there at all.

    checkpoints/step-00012/
        config.json, model.safetensors, tokenizer files     loads with transformers as it is
        optimizer.safetensors                               Adam's moments and step counts, by parameter name
        state.json                                          step, version, RNG, data position, sha256 of every file

A folder under its final name is complete: it is written beside, flushed to the disk, and renamed. No pickle is
involved.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanorl.errors import CheckpointError
from nanorl.train.trainer import Trainer

STATE, OPTIMIZER, WEIGHTS = "state.json", "optimizer.safetensors", "model.safetensors"


class TrainState(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything a run needs beside tensors to go on exactly where it stood."""

    step: int
    """Loop steps that are done."""
    weight_version: int
    """What the engine holds."""
    data: dict[str, Any]
    """Position of the prompt stream."""
    num_updates: int = 0
    """Optimizer steps that are done."""
    generator: str = ""
    """State of the minibatch order's random numbers, in hex."""
    sha256: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """File name -> hash, so that a damaged checkpoint is noticed before it trains."""


def save_checkpoint(folder: Path, trainer: Trainer, source: Path, state: TrainState, *, keep: int) -> Path:
    """Writes `folder`/step-N, then removes all but the newest `keep`.

    Args:
        folder: the run's `checkpoints`.
        trainer: whose weights and optimizer are kept.
        source: the model's folder; its configuration and tokenizer are copied.
        state: what belongs to others than the trainer; its step is N.
        keep: how many checkpoints stay.

    Raises:
        CheckpointError: the disk is full or can't be written; older checkpoints are untouched.
    """
    path = checkpoint_path(folder, state.step)
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_settings(source, partial)
        save_file(_own_storage(trainer), partial / WEIGHTS, metadata={"format": "pt"})
        save_file(_optimizer_tensors(trainer), partial / OPTIMIZER)
        state = msgspec.structs.replace(
            state,
            num_updates=trainer.num_updates,
            generator=bytes(trainer.generator.get_state().tolist()).hex(),
            sha256={file.name: _hash(file) for file in sorted(partial.iterdir())},
        )
        (partial / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
        for file in partial.iterdir():
            _flush(file)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"Can't write the checkpoint {path}: {error}. Free some space; older ones are untouched."
        ) from None
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(checkpoint_path(folder, old), ignore_errors=True)
    return path


def load_checkpoint(path: Path, trainer: Trainer) -> TrainState:
    """Puts weights, optimizer and random numbers back; returns what belongs to others.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model. The trainer is unusable then.
    """
    state = read_state(path)
    try:
        weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
        _restore_weights(trainer, weights)
        _restore_optimizer(trainer, moments)
        trainer.generator.set_state(torch.tensor(list(bytes.fromhex(state.generator)), dtype=torch.uint8))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"The checkpoint {path} doesn't fit this run's model or is damaged: {error}") from None
    trainer.num_updates = state.num_updates
    return state


def read_state(path: Path) -> TrainState:
    """The state of a checkpoint, after every file's hash was compared.

    Raises:
        CheckpointError: there is none, or it is incomplete or damaged.
    """
    try:
        state = msgspec.json.decode((path / STATE).read_bytes(), type=TrainState)
        damaged = [name for name, sha256 in state.sha256.items() if _hash(path / name) != sha256]
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"Expected a complete checkpoint in {path}: {error}. Resume from another step.") from None
    if damaged:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {', '.join(damaged)} changed. Resume from another step."
        )
    return state


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:05d}"


def list_checkpoints(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint, oldest first."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob(f"step-*/{STATE}"))


def _own_storage(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights on the CPU, each storage once: tied parameters under their first name, as transformers expects them."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in trainer.named_tensors():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


def _optimizer_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """`<parameter>|<exp_avg, exp_avg_sq or step>` -> tensor; empty before the first optimizer step."""
    return {
        f"{name}|{key}": value.detach().cpu()
        for name, parameter in trainer.policy.model.named_parameters()
        for key, value in trainer.optimizer.state.get(parameter, {}).items()
    }


def _restore_weights(trainer: Trainer, weights: Mapping[str, torch.Tensor]) -> None:
    own = dict(trainer.named_tensors())
    missing = _own_storage(trainer).keys() ^ weights.keys()
    if missing:
        raise ValueError(f"parameters differ: {', '.join(sorted(missing)[:3])}")
    with torch.no_grad():
        for name, tensor in weights.items():
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model {list(own[name].shape)}")
            own[name].copy_(tensor)


def _restore_optimizer(trainer: Trainer, moments: Mapping[str, torch.Tensor]) -> None:
    parameters = dict(trainer.policy.model.named_parameters())
    for key, value in moments.items():
        name, _, field = key.rpartition("|")
        parameter = parameters[name]
        # Adam's step counter stays where the fused kernel wants it: beside the parameter.
        trainer.optimizer.state.setdefault(parameter, {})[field] = value.to(parameter.device)


def _copy_settings(source: Path, target: Path) -> None:
    """Configuration and tokenizer: everything small that is no weight."""
    for file in source.iterdir():
        if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in file.name:
            shutil.copyfile(file, target / file.name)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
