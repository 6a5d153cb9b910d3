"""Which carriers reach an engine from this process, and the sync behind each name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch

from nanorl.config import SyncConfig
from nanorl.engine.client import EngineClient
from nanorl.errors import WeightSyncError
from nanorl.weight_sync.base import WeightSync
from nanorl.weight_sync.cuda_ipc import CudaIpcSync
from nanorl.weight_sync.disk import DiskSync
from nanorl.weight_sync.shared_memory import SharedMemorySync

Carrier = Literal["shared_memory", "cuda_ipc", "disk"]

LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}


def allowed_carriers(client: EngineClient, device: torch.device) -> tuple[Carrier, ...]:
    """The carriers that work between a trainer on `device` and this engine, the fastest first."""
    return reaching_carriers(client.url, str(client.server_info().get("device", "cuda")), device.type)


def reaching_carriers(url: str, engine_device: str, trainer_device: str) -> tuple[Carrier, ...]:
    """The same, where both devices are known.

    A handle needs one machine: CUDA IPC where both sides are on a GPU, shared memory where the engine is on a CPU. The
    disk needs a path that both can read, which is taken for granted.
    """
    is_local = urlsplit(url).hostname in LOCAL_HOSTS
    if is_local and engine_device.startswith("cuda") and trainer_device == "cuda":
        return ("cuda_ipc", "disk")
    if is_local and engine_device == "cpu":
        return ("shared_memory", "disk")
    return ("disk",)


def choose_carrier(wanted: Carrier | Literal["auto"], allowed: Sequence[Carrier], url: str) -> Carrier:
    """The wanted carrier; `auto` is the fastest that works.

    Raises:
        WeightSyncError: it doesn't reach this engine.
    """
    if wanted == "auto":
        return allowed[0]
    if wanted not in allowed:
        raise WeightSyncError(
            f"sync.carrier {wanted} doesn't reach the engine {url} from this trainer: shared_memory needs the engine "
            f"on this machine's CPU, cuda_ipc both on its GPUs. What does: {', '.join(allowed)}."
        )
    return wanted


def make_sync(section: SyncConfig, client: EngineClient, device: torch.device, folder: Path) -> WeightSync:
    """The configured sync; `auto` takes the fastest that works. `folder` is for the disk carrier's files.

    Raises:
        WeightSyncError: the carrier doesn't reach this engine.
    """
    chosen = choose_carrier(section.carrier, allowed_carriers(client, device), client.url)
    max_bytes = section.bucket_mb * 1_000_000 if section.bucket_mb else None
    if chosen == "cuda_ipc":
        return CudaIpcSync(client, device=device, max_bucket_bytes=max_bytes)
    if chosen == "shared_memory":
        return SharedMemorySync(client, max_bucket_bytes=max_bytes)
    return DiskSync(client, folder / "weights")
