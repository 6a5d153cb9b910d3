"""The sync over a folder: for engines that share a disk with the trainer and nothing else. Slow and universal."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nanorl.engine.client import EngineClient
from nanorl.engine.protocol import WeightUpdateFromDisk
from nanorl.errors import WeightSyncError
from nanorl.weight_sync.base import NamedTensors, Stopwatch, SyncReport, check_version, paused
from nanorl.weight_sync.bucket import drop_aliases, wire_dtype
from nanorl.weight_sync.verification import check_all, check_shapes, engine_dtype


class DiskSync:
    """Writes safetensors into a folder of its own and has the engine read them.

    Args:
        client: the engine.
        folder: where, under the run folder; both sides see it by this path. Each version's files are removed after the
            sync.
        dtype: what floating-point tensors are saved as; None: what the engine says that it stores.

    Raises:
        WeightSyncError: no space, the engine serves another model, refuses, or reports another version afterwards.
    """

    def __init__(self, client: EngineClient, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        self._client = client
        self._folder = folder.resolve()
        self._dtype = dtype
        self._is_checked = False

    def sync(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        """Makes the engine hold these weights as `version`. Needs no weight session: a folder is always complete."""
        tensors = drop_aliases(named_tensors)
        if not self._is_checked:
            check_shapes(self._client, tensors)
            self._dtype = self._dtype or engine_dtype(self._client)
            self._is_checked = True
        watch = Stopwatch()
        path = self._folder / f"weights-{version}"
        try:
            with watch.lap("copy"):
                num_bytes = self._save(tensors, path)
            update = WeightUpdateFromDisk(model_path=str(path), weight_version=str(version), flush_cache=False)
            with paused(self._client, watch), watch.lap("send"):
                self._client.update_from_disk(update)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        with watch.lap("verify"):
            check_version(self._client, version)
        return watch.report(version, num_bytes, len(tensors))

    def verify(self, named_tensors: NamedTensors) -> int:
        """Compares every tensor by checksum; returns how many. Raises: WeightSyncError naming those that differ."""
        return check_all(self._client, drop_aliases(named_tensors), self._dtype or engine_dtype(self._client))

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self, tensors: dict[str, torch.Tensor], path: Path) -> int:
        """Writes under a temporary name and renames: a reader sees all of it or nothing. Returns the bytes."""
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        saved = {name: t.to("cpu", wire_dtype(t, self._dtype)).contiguous() for name, t in tensors.items()}
        try:
            partial.mkdir(parents=True)
            save_file(saved, str(partial / "model.safetensors"), metadata={"format": "pt"})
            partial.rename(path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightSyncError(f"Can't write the weights to {path}: {error}") from None
        return sum(t.numel() * t.itemsize for t in saved.values())
