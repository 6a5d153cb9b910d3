"""Who computes on which share of a CPU, where trainer and engine compute at the same time."""

import contextlib
import os
from collections.abc import Iterator

import torch

VARIABLE = "OMP_NUM_THREADS"


@contextlib.contextmanager
def shared_cores(device: str) -> Iterator[None]:
    """Half of the cores for this process, and for the engine that is started within the block; all of them on a GPU.

    Two sides with as many threads as there are cores wait for each other's spinning threads at every barrier: on two
    cores the tiny model's training step took ten times as long. A user's own OMP_NUM_THREADS is left as it is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if VARIABLE in os.environ or device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        yield
        return
    before, half = torch.get_num_threads(), max(1, cores // 2)
    os.environ[VARIABLE] = str(half)
    torch.set_num_threads(half)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        torch.set_num_threads(before)
