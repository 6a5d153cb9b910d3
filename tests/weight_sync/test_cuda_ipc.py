"""The bucket on a GPU: its handle, made once, is opened by another process again and again, and nothing leaks."""

import subprocess
import sys

import pytest
import torch

from nanorl.weight_sync.bucket import FlatBucket

READER = """
import sys, torch
from nanorl.engine.tensor_payload import deserialize_bucket

held = None
for line in sys.stdin:
    flat, metadata = deserialize_bucket(line.strip())
    if held is None:
        held = torch.empty_like(flat)
    held.copy_(flat)
    torch.cuda.synchronize()
    values = [held[m.start_idx : m.end_idx].view(m.dtype).double().sum().item() for m in metadata]
    del flat
    free, _ = torch.cuda.mem_get_info()
    print(sum(values), free, flush=True)
"""


@pytest.mark.gpu
def test_another_process_reads_the_same_handle_two_hundred_times() -> None:
    """slime 1731, sglang 4446: IPC handles leak; memory stays flat on both sides."""
    tensors = {f"layer{i}": torch.full((1 << 20,), 1.0, device="cuda") for i in range(8)}
    bucket = FlatBucket(tensors, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    assert reader.stdout is not None
    free_memory: list[int] = []
    handles = set()
    for step in range(200):
        for tensor in tensors.values():
            tensor.fill_(step % 100)
        bucket.fill(bucket.layouts[0], tensors)
        torch.cuda.synchronize()
        handles.add(bucket.payload(0))
        reader.stdin.write(bucket.payload(0) + "\n")
        reader.stdin.flush()
        total, free = reader.stdout.readline().split()
        assert float(total) == (step % 100) * 8 * (1 << 20)
        free_memory.append(int(free))
    reader.stdin.close()
    assert reader.wait(30) == 0
    assert len(handles) == 1
    assert abs(free_memory[-1] - free_memory[20]) < 32 << 20
