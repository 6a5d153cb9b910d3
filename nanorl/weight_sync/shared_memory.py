"""The sync by handle: parameters are copied into one persistent bucket; the engine gets a handle, never the bytes.

Shared memory for an engine on this machine's CPU; `cuda_ipc` is the same with the bucket on a GPU.
"""

from collections.abc import Mapping

import torch

from nanorl.engine.client import EngineClient
from nanorl.engine.protocol import FLATTENED_BUCKET, WeightUpdateFromTensor
from nanorl.engine.sglang import LOADER
from nanorl.weight_sync.base import NamedTensors, Stopwatch, SyncReport, check_version, paused, weight_session
from nanorl.weight_sync.bucket import FlatBucket, drop_aliases
from nanorl.weight_sync.verification import check_all, check_first_values, check_shapes, engine_dtype


class SharedMemorySync:
    """Moves weights to one engine of this machine. The first sync compares names and shapes and makes the bucket.

    Args:
        client: the engine. The sync uses it alone, from the thread that calls `sync`.
        dtype: what floating-point tensors travel as; None: what the engine says that it stores.
        max_bucket_bytes: splits a big model into several calls over a smaller buffer; None: one call.
        device: where the bucket lies.

    Raises:
        WeightSyncError: the engine serves another model, refuses, or holds other weights or another version afterwards.
        EngineError: it doesn't answer.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        dtype: torch.dtype | None = None,
        max_bucket_bytes: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._client = client
        self._dtype = dtype
        self._max_bucket_bytes = max_bucket_bytes
        self._device = device or self._own_device()
        self._bucket: FlatBucket | None = None
        self._load_format = FLATTENED_BUCKET
        self._num_ranks = 1
        self._tells_values = True

    def sync(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        """Makes the engine hold these weights as `version`: pause, begin, send, end, flush, continue, check."""
        tensors = drop_aliases(named_tensors)
        bucket = self._bucket if self._bucket is not None and self._bucket.is_reachable else self._prepare(tensors)
        watch = Stopwatch()
        # The first copy happens while the engine still generates: it stalls only for the calls.
        self._fill(bucket, 0, tensors, watch)
        with paused(self._client, watch), weight_session(self._client, watch):
            for index in range(len(bucket.layouts)):
                if index:
                    self._fill(bucket, index, tensors, watch)
                self._send(bucket, index, version, watch)
        with watch.lap("verify"):
            self._check(tensors, version)
        return watch.report(version, bucket.num_bytes, bucket.num_tensors)

    def verify(self, named_tensors: NamedTensors) -> int:
        """Compares every tensor by checksum; returns how many. Raises: WeightSyncError naming those that differ."""
        return check_all(self._client, drop_aliases(named_tensors), self._dtype or engine_dtype(self._client))

    def close(self) -> None:
        """Frees the bucket; its shared memory goes with it."""
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None

    @classmethod
    def _own_device(cls) -> torch.device:
        """Where the bucket lies if nobody says."""
        return torch.device("cpu")

    def _prepare(self, tensors: Mapping[str, torch.Tensor]) -> FlatBucket:
        self.close()
        check_shapes(self._client, tensors)
        _ = self._client.has_weight_session  # read once, outside of what is timed
        self._dtype = self._dtype or engine_dtype(self._client)
        info = self._client.server_info()
        loader = LOADER in (info.get("custom_weight_loader") or ())
        self._load_format = LOADER if loader else FLATTENED_BUCKET
        self._num_ranks = int(info.get("tp_size") or 1)
        self._bucket = FlatBucket(
            tensors, dtype=self._dtype, device=self._device, max_bytes=self._max_bucket_bytes, for_loader=loader
        )
        return self._bucket

    def _fill(self, bucket: FlatBucket, index: int, tensors: Mapping[str, torch.Tensor], watch: Stopwatch) -> None:
        with watch.lap("copy"):
            bucket.fill(bucket.layouts[index], tensors)

    def _send(self, bucket: FlatBucket, index: int, version: int, watch: Stopwatch) -> None:
        with watch.lap("serialize"):
            payload = bucket.payload(index)
        is_last = index == len(bucket.layouts) - 1
        update = WeightUpdateFromTensor(
            serialized_named_tensors=[payload] * self._num_ranks,
            load_format=self._load_format,
            flush_cache=False,  # once, after the session
            # A sync that breaks off half way must not leave the new version's name on mixed weights.
            weight_version=str(version) if is_last else None,
        )
        with watch.lap("send"):
            self._client.update_from_tensor(update)

    def _check(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        check_version(self._client, version)
        if self._tells_values:
            self._tells_values = check_first_values(self._client, tensors, self._dtype, version)
