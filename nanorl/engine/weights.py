"""The engine's weights: the update session, checks before anything is copied, loading by name."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanorl.engine.checksum import tensor_checksum
from nanorl.engine.tensor_payload import FlattenedTensorMetadata
from nanorl.errors import WeightSyncError


class WeightStore:
    """The model's parameters and persistent buffers under their Hugging Face names. Lives on the engine's thread."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Canonical names: each tensor once."""
        self.aliases: dict[str, str] = {}
        """Second names of the same tensor (a tied head) -> canonical name."""
        self.session_open = False
        first_names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            canonical = first_names.setdefault(id(tensor), name)
            if canonical == name:
                self.tensors[name] = tensor
            else:
                self.aliases[name] = canonical

    # The session

    def begin(self) -> None:
        """Opens the session. Raises: WeightSyncError where one is open."""
        if self.session_open:
            raise WeightSyncError("a weight-update session is already open; call end_weight_update() first")
        self.session_open = True

    def end(self) -> None:
        """Closes the session. Raises: WeightSyncError where none is open."""
        if not self.session_open:
            raise WeightSyncError("no weight-update session is open; call begin_weight_update() first")
        self.session_open = False

    def require_session(self, caller: str) -> None:
        """Raises: WeightSyncError outside a session."""
        if not self.session_open:
            raise WeightSyncError(f"{caller} must run between begin_weight_update() and end_weight_update()")

    # Loading

    def plan(self, named_tensors: Sequence[tuple[str, Any]]) -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
        """Checks all tensors before any is copied.

        Returns:
            ((own tensor, new values) pairs, names that the model doesn't have).

        Raises:
            WeightSyncError: a wrong shape, something that is no tensor, or no known name at all; with the names.
        """
        given = dict(named_tensors)
        unknown = [name for name in given if name not in self.tensors and name not in self.aliases]
        if given and len(unknown) == len(given):
            raise WeightSyncError(
                f"None of the {len(given)} names is a parameter of this model, such as {unknown[0]!r}"
            )
        faults: list[str] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, value in given.items():
            canonical = self.aliases.get(name, name)
            if name in unknown or (canonical != name and canonical in given):
                continue  # a tied head that is sent twice counts once, under its first name
            own = self.tensors[canonical]
            if not isinstance(value, Tensor) or value.shape != own.shape:
                came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                faults.append(f"{name}: expected {tuple(own.shape)}, got {came}")
            else:
                pairs.append((own, value))
        if faults:
            raise WeightSyncError(f"Nothing was changed, {len(faults)} shapes are wrong: {'; '.join(faults[:5])}")
        return pairs, unknown

    @torch.no_grad()
    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copies values over; done, on a GPU too, when this returns: the sender may then write to its memory again."""
        if not pairs:
            return
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
        if targets[0].is_cuda:
            torch.cuda.synchronize(targets[0].device)

    # Reading

    def checksums(self) -> dict[str, str]:
        """The checksum of every tensor under its canonical name."""
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}

    def first_rows(self, name: str, truncate_size: int) -> list[Any] | None:
        """The first `truncate_size` rows of a tensor as nested lists; None for an unknown name."""
        tensor = self.tensors.get(self.aliases.get(name, name))
        return None if tensor is None else tensor.detach()[:truncate_size].float().tolist()

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes, for a sender to compare before sending."""
        parameters = {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in self.tensors.items()
        }
        return {"parameters": parameters, "aliases": self.aliases}


def split_bucket(flat: Tensor, metadata: Sequence[FlattenedTensorMetadata]) -> list[tuple[str, Tensor]]:
    """The (name, tensor) of a flattened bucket, as views of it.

    Raises:
        WeightSyncError: metadata that doesn't fit the bucket.
    """
    return [(entry.name, _view(flat, entry)) for entry in metadata]


def _view(flat: Tensor, entry: FlattenedTensorMetadata) -> Tensor:
    num_bytes = entry.shape.numel() * entry.dtype.itemsize
    if not 0 <= entry.start_idx <= entry.end_idx <= flat.numel() or entry.end_idx - entry.start_idx != num_bytes:
        raise WeightSyncError(
            f"{entry.name}: {tuple(entry.shape)} of {entry.dtype} takes {num_bytes} bytes, but the metadata gives it "
            f"[{entry.start_idx}, {entry.end_idx}) of {flat.numel()}"
        )
    part = flat[entry.start_idx : entry.end_idx]
    # Reading bytes as numbers needs alignment; a sender that packs tightly need not have it.
    is_aligned = part.storage_offset() % entry.dtype.itemsize == 0
    return (part if is_aligned else part.clone()).view(entry.dtype).view(entry.shape)


def overall_checksum(checksums: Mapping[str, str]) -> str:
    """SHA-256 over names and checksums in order of the names, as SGLang's."""
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update((name + checksums[name]).encode())
    return digest.hexdigest()


def read_folder(path: str) -> list[tuple[str, Tensor]]:
    """All tensors of a folder's safetensors files.

    Raises:
        WeightSyncError: no such folder, no such files, or an unreadable one.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"Expected a folder with *.safetensors files, found none in {path}")
    tensors: list[tuple[str, Tensor]] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118 no mapping
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{file} can't be read: {error}") from None
    return tensors
