"""Which carriers reach an engine from this process, and the sync behind each name."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch

from nanorl.engine.client import EngineClient
from nanorl.errors import WeightSyncError
from nanorl.weight_sync.base import WeightSync
from nanorl.weight_sync.cuda_ipc import CudaIpcSync
from nanorl.weight_sync.disk import DiskSync
from nanorl.weight_sync.shared_memory import SharedMemorySync

Carrier = Literal["shared_memory", "cuda_ipc", "disk"]

LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}


def allowed_carriers(client: EngineClient, device: torch.device) -> tuple[Carrier, ...]:
    """The carriers that work between a trainer on `device` and this engine, the fastest first.

    A handle needs one machine: CUDA IPC where both sides are on a GPU, shared memory where the engine is on a CPU.
    The disk
    needs a path that both can read, which is taken for granted.
    """
    is_local = urlsplit(client.url).hostname in LOCAL_HOSTS
    engine_device = str(client.server_info().get("device", "cuda"))
    if is_local and engine_device.startswith("cuda") and device.type == "cuda":
        return ("cuda_ipc", "disk")
    if is_local and engine_device == "cpu":
        return ("shared_memory", "disk")
    return ("disk",)


def make_sync(
    carrier: Carrier | Literal["auto"],
    client: EngineClient,
    device: torch.device,
    folder: Path,
    *,
    bucket_mb: int | None = None,
) -> WeightSync:
    """The sync of that name; `auto` takes the fastest that works.

    `folder` is for the disk carrier's files; `bucket_mb` splits a big model where there is a bucket.

    Raises:
        WeightSyncError: the carrier doesn't reach this engine.
    """
    allowed = allowed_carriers(client, device)
    chosen = allowed[0] if carrier == "auto" else carrier
    if chosen not in allowed:
        raise WeightSyncError(
            f"sync.carrier {chosen} doesn't reach the engine {client.url} from a trainer on {device}. "
            f"What does: {', '.join(allowed)}."
        )
    max_bytes = bucket_mb * 1_000_000 if bucket_mb else None
    if chosen == "cuda_ipc":
        return CudaIpcSync(client, device=device, max_bucket_bytes=max_bytes)
    if chosen == "shared_memory":
        return SharedMemorySync(client, max_bucket_bytes=max_bytes)
    return DiskSync(client, folder / "weights")
