"""Named shared memory that torch in another process can open, without torch's own sharing daemon.

torch would start a `torch_shm_manager`, which outlives us for as long as any engine that once opened a buffer lives,
holding our stdout open (`nanorl train | tee log` would never end). So the memory is made here, in the layout that
torch's readers expect: 64 bytes whose first int32 counts references, then the data. The count starts so high that no
reader ever unlinks the name; we do, and after a kill -9 the standard library's resource tracker does.

Source: aten/src/ATen/MapAllocator.cpp (RefcountedMapAllocator), unchanged since torch 1.0.
"""

import _posixshmem
import contextlib
import itertools
import mmap
import os
import re
import struct
from multiprocessing import resource_tracker
from pathlib import Path

import torch

_HEADER_BYTES = 64
_ENDLESS_REFERENCES = 1 << 30
_count = itertools.count()


class SharedBuffer:
    """[num_bytes] uint8 in shared memory, under a name that holds this process's id, so that two runs never meet."""

    def __init__(self, num_bytes: int) -> None:
        remove_stale_buffers()
        self.name = f"/nanorl-{_pid_namespace()}-{os.getpid()}-{next(_count)}"
        self._is_open = True
        descriptor = _posixshmem.shm_open(self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        try:
            resource_tracker.register(self.name, "shared_memory")
            # Not ftruncate: on a full /dev/shm that succeeds, and the first write is a bus error.
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + num_bytes)
            memory = mmap.mmap(descriptor, _HEADER_BYTES + num_bytes)
        except OSError:
            self.close()
            raise
        finally:
            os.close(descriptor)
        struct.pack_into("=i", memory, 0, _ENDLESS_REFERENCES)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES)

    @property
    def is_linked(self) -> bool:
        """Whether the name still leads here."""
        try:
            os.close(_posixshmem.shm_open(self.name, os.O_RDONLY, mode=0o600))
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Takes the name away; the memory goes with its last tensor, here and in the engine."""
        if self._is_open:
            self._is_open = False
            _unlink(self.name)
            resource_tracker.unregister(self.name, "shared_memory")

    def __del__(self) -> None:
        self.close()


def open_shared_buffer(name: str, num_bytes: int) -> torch.UntypedStorage:
    """Maps another process's SharedBuffer. Raises: OSError where the name is gone."""
    descriptor = _posixshmem.shm_open(name, os.O_RDWR, mode=0o600)
    try:
        memory = mmap.mmap(descriptor, _HEADER_BYTES + num_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES).untyped_storage()


def remove_stale_buffers() -> None:
    """Removes the buffers of dead processes: kill -9 of a whole process group takes the resource tracker along too."""
    for path in Path("/dev/shm").glob(f"nanorl-{_pid_namespace()}-*"):
        match = re.fullmatch(r"nanorl-\d+-(\d+)-\d+", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _unlink(f"/{path.name}")


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        _posixshmem.shm_unlink(name)


def _pid_namespace() -> int:
    """Containers may share /dev/shm but not process ids: only ids of our own namespace say who is dead."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
