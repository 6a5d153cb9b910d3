"""How a bucket of weights travels: a base64 pickle of a handle to shared or CUDA IPC memory, never of the bytes.

SGLang's form: a ForkingPickler dump of `{"flattened_tensor": uint8 tensor, "metadata": [FlattenedTensorMetadata,
...]}`, the metadata class pickled by reference to SGLang's own module. Nothing here needs SGLang installed.

Source: sglang/srt/weight_sync/tensor_bucket.py, sglang/srt/utils/patch_torch.py (0.5.23).
"""

import base64
import contextlib
import io
import json
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from nanorl.engine.shared_buffer import open_shared_buffer
from nanorl.errors import WeightSyncError

_METADATA_MODULE = "sglang.srt.weight_sync.tensor_bucket"
_REBUILD_CUDA = ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
_CUDA_DEVICE_ARGUMENT = 6
"""Place of the device index among rebuild_cuda_tensor's arguments, unchanged for years."""
_lock = threading.Lock()


@dataclass
class FlattenedTensorMetadata:
    """Where one tensor lies in a flat uint8 bucket; field names and order are SGLang's."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    """First byte in the bucket."""
    end_idx: int
    """One past the last byte."""
    numel: int
    """Bytes, in spite of its name: end_idx - start_idx."""


# Pickled by reference, so the class must say that it lives where SGLang's twin does.
FlattenedTensorMetadata.__module__ = _METADATA_MODULE


def serialize_bucket(
    flat: torch.Tensor, metadata: Sequence[FlattenedTensorMetadata], *, shared_name: str | None = None
) -> str:
    """The bucket's handle as SGLang takes it; good for any number of readers, as long as `flat` lives.

    Args:
        flat: [bytes] uint8, contiguous: on a GPU, or the tensor of a SharedBuffer.
        metadata: where each tensor lies.
        shared_name: the SharedBuffer's name, for a CPU tensor.
    """
    return _serialize({"flattened_tensor": flat, "metadata": list(metadata)}, shared_name)


def serialize_for_loader(
    flat: torch.Tensor, metadata: Sequence[FlattenedTensorMetadata], *, shared_name: str | None = None
) -> str:
    """The same for `nanorl.engine.sglang_loader`: one pair of the layout in JSON and the bucket."""
    layout = [(m.name, str(m.dtype).removeprefix("torch."), tuple(m.shape), m.start_idx, m.end_idx) for m in metadata]
    return _serialize([(json.dumps(layout), flat)], shared_name)


def _serialize(value: Any, shared_name: str | None) -> str:
    stream = io.BytesIO()
    with _lock, _sglang_names():
        _BucketPickler(stream, shared_name).dump(value)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def deserialize_bucket(payload: str) -> tuple[torch.Tensor, list[FlattenedTensorMetadata]]:
    """Opens a bucket: a view of the sender's memory, to be copied out before the answer.

    Raises:
        WeightSyncError: the payload is no bucket, or names anything beyond tensors and metadata.
    """
    bucket = _load(payload)
    if not isinstance(bucket, dict) or not isinstance(bucket.get("flattened_tensor"), torch.Tensor):
        raise WeightSyncError(f"Expected a bucket of flattened_tensor and metadata, got {type(bucket).__name__}")
    metadata = bucket.get("metadata")
    if not isinstance(metadata, list) or not all(isinstance(entry, FlattenedTensorMetadata) for entry in metadata):
        raise WeightSyncError("Expected the bucket's metadata to be a list of FlattenedTensorMetadata")
    return bucket["flattened_tensor"], metadata


def deserialize_named_tensors(payload: str) -> list[tuple[str, torch.Tensor]]:
    """Opens a payload that was sent without load_format: a list of (name, tensor), views of the sender's memory.

    Raises:
        WeightSyncError: the payload is no such list, or names anything beyond tensors.
    """
    pairs = _load(payload)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise WeightSyncError(
            f"Expected a list of (name, tensor), got {type(pairs).__name__}: was load_format forgotten?"
        )
    return [(str(name), tensor) for name, tensor in pairs]


def _load(payload: str) -> Any:
    try:
        return _BucketUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    except WeightSyncError:
        raise
    except Exception as error:  # a pickle can fail in any way it likes: one catch-all at this boundary
        raise WeightSyncError(
            f"Expected a base64 pickle of handles to tensors, got one that can't be opened: {error!r}"
        ) from error


class _BucketPickler(ForkingPickler):
    """Pickles tensors as handles."""

    def __init__(self, stream: io.BytesIO, shared_name: str | None) -> None:
        super().__init__(stream)
        self._shared_name = shared_name

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            if self._shared_name is None:
                raise WeightSyncError("A bucket on the CPU must lie in a SharedBuffer, and its name be given")
            # No manager: torch's readers then keep their own books, and start nothing here.
            return reductions.rebuild_storage_filename, (type(value), b"", self._shared_name.encode(), value.nbytes())
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return _reduce_cuda_tensor(value)
        return NotImplemented


class _BucketUnpickler(pickle.Unpickler):
    """Knows tensors and metadata, and nothing else: a pickle from the network must not name arbitrary callables."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch", "Tensor"),
            ("torch.storage", "UntypedStorage"),
            ("torch", "UntypedStorage"),
            ("torch.storage", "TypedStorage"),
            ("torch", "ByteStorage"),
            ("torch.multiprocessing.reductions", "rebuild_tensor"),
            ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
            ("torch.multiprocessing.reductions", "rebuild_storage_empty"),
            ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_METADATA_MODULE, "FlattenedTensorMetadata"):
            return FlattenedTensorMetadata
        if (module, name) == _REBUILD_CUDA:
            return _rebuild_cuda_tensor
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_storage_filename"):
            return _rebuild_shared_storage
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise WeightSyncError(f"A bucket of weights may not name {module}.{name}")


def _rebuild_shared_storage(storage_class: type, manager: bytes, handle: bytes, num_bytes: int) -> Any:
    """A nanorl buffer is opened without torch's daemon; other clients' buffers as torch does it."""
    if not manager:
        return open_shared_buffer(handle.decode(), num_bytes)
    return reductions.rebuild_storage_filename(storage_class, manager, handle, num_bytes)


def _reduce_cuda_tensor(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As torch does it, but with the device's UUID: both sides may number their GPUs differently."""
    arguments: Any = reductions.reduce_tensor(tensor)[1]
    uuid = str(torch.cuda.get_device_properties(arguments[_CUDA_DEVICE_ARGUMENT]).uuid)
    named = (*arguments[:_CUDA_DEVICE_ARGUMENT], uuid, *arguments[_CUDA_DEVICE_ARGUMENT + 1 :])
    return _rebuild_cuda_tensor, named


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    device: Any = arguments[_CUDA_DEVICE_ARGUMENT]
    if isinstance(device, str):
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if device not in uuids:
            raise WeightSyncError(f"The weights lie on GPU {device}, which this process doesn't see; it sees {uuids}")
        device = uuids.index(device)
    rebuild: Callable[..., torch.Tensor] = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:_CUDA_DEVICE_ARGUMENT], device, *arguments[_CUDA_DEVICE_ARGUMENT + 1 :])


_rebuild_cuda_tensor.__module__, _rebuild_cuda_tensor.__qualname__ = _REBUILD_CUDA


@contextlib.contextmanager
def _sglang_names() -> Iterator[None]:
    """While pickling, SGLang's module names lead to our twins: pickle looks up each global that it names."""
    metadata, rebuild = types.ModuleType(_METADATA_MODULE), types.ModuleType(_REBUILD_CUDA[0])
    metadata.FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    setattr(rebuild, _REBUILD_CUDA[1], _rebuild_cuda_tensor)
    twins = {module.__name__: module for module in (metadata, rebuild)}
    for path in list(twins):
        parts = path.split(".")
        for depth in range(1, len(parts)):
            package = ".".join(parts[:depth])
            twins.setdefault(package, types.ModuleType(package))
    before = {name: sys.modules.get(name) for name in twins}
    sys.modules.update(twins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
