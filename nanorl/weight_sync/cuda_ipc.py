"""The sync by handle with the bucket on a GPU that trainer and engine share: CUDA IPC, the device named by its UUID."""

from collections.abc import Mapping

import torch

from nanorl.weight_sync.base import Stopwatch
from nanorl.weight_sync.bucket import FlatBucket
from nanorl.weight_sync.shared_memory import SharedMemorySync


class CudaIpcSync(SharedMemorySync):
    """As SharedMemorySync, on the GPU where the engine lives; the two may number their GPUs differently."""

    @classmethod
    def _own_device(cls) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _fill(self, bucket: FlatBucket, index: int, tensors: Mapping[str, torch.Tensor], watch: Stopwatch) -> None:
        with watch.lap("copy"):
            bucket.fill(bucket.layouts[index], tensors)
            # The engine reads from another process, whose streams know nothing of ours.
            torch.cuda.current_stream(self._device).synchronize()
