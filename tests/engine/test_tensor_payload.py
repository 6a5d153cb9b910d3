"""Buckets travel as handles that any torch process can open, and nothing but tensors is let in."""

import base64
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanorl.engine.checksum import tensor_checksum
from nanorl.engine.shared_buffer import SharedBuffer
from nanorl.engine.tensor_payload import FlattenedTensorMetadata, deserialize_bucket, serialize_bucket
from nanorl.errors import WeightSyncError


def bucket_of(values: torch.Tensor) -> tuple[SharedBuffer, str]:
    buffer = SharedBuffer(values.nbytes)
    buffer.tensor.view(values.dtype).copy_(values)
    place = FlattenedTensorMetadata("w", values.shape, values.dtype, 0, values.nbytes, values.nbytes)
    return buffer, serialize_bucket(buffer.tensor, [place], shared_name=buffer.name)


def buffers_of(pid: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"nanorl-*-{pid}-*")]


def test_opens_as_a_view_of_the_senders_memory() -> None:
    buffer, payload = bucket_of(torch.arange(4.0))
    flat, (metadata,) = deserialize_bucket(payload)
    assert flat.view(torch.float32).tolist() == [0, 1, 2, 3]
    assert (metadata.name, metadata.shape, metadata.dtype) == ("w", torch.Size([4]), torch.float32)
    buffer.tensor.zero_()
    assert flat.view(torch.float32).tolist() == [0, 0, 0, 0]
    assert "sglang" not in sys.modules


def test_plain_torch_in_another_process_opens_it_again_and_again() -> None:
    """SGLang's side: torch's own reader, many times over one handle; torch alone would unlink after the second."""
    buffer, payload = bucket_of(torch.arange(4.0))
    code = (
        "import base64, pickle, sys, types, torch\n"
        "name = 'sglang.srt.weight_sync.tensor_bucket'\n"
        "parts = name.split('.')\n"
        "for i in range(len(parts)): sys.modules['.'.join(parts[:i + 1])] = types.ModuleType('.'.join(parts[:i + 1]))\n"
        "class FlattenedTensorMetadata: pass\n"
        "FlattenedTensorMetadata.__module__ = name\n"
        "sys.modules[name].FlattenedTensorMetadata = FlattenedTensorMetadata\n"
        "for _ in range(5):\n"
        "    bucket = pickle.loads(base64.b64decode(sys.argv[1]))\n"
        "    print(bucket['flattened_tensor'].view(torch.float32).tolist(), bucket['metadata'][0].name)\n"
        "    del bucket\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, payload], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["[0.0, 1.0, 2.0, 3.0] w"] * 5, done.stderr
    buffer.close()


@pytest.mark.parametrize("evil", [os.system, eval, torch.load, subprocess.Popen])
def test_a_payload_may_not_name_anything_else(evil: object) -> None:
    payload = base64.b64encode(pickle.dumps({"flattened_tensor": evil, "metadata": []})).decode()
    with pytest.raises(WeightSyncError, match="may not name"):
        deserialize_bucket(payload)


@pytest.mark.parametrize("payload", ["AAAA", "no base64!", base64.b64encode(pickle.dumps([1])).decode()])
def test_nonsense_is_an_error_that_says_so(payload: str) -> None:
    with pytest.raises(WeightSyncError, match="Expected a "):
        deserialize_bucket(payload)


def test_a_gone_buffer_is_an_error() -> None:
    buffer, payload = bucket_of(torch.arange(4.0))
    buffer.close()
    with pytest.raises(WeightSyncError, match="can't be opened"):
        deserialize_bucket(payload)


def test_names_never_meet_and_go_with_their_buffers() -> None:
    """verl 6246: two runs on one host share a name. Ours holds the process id and a count."""
    gc.collect()  # other tests' buffers may wait for it
    before = sorted(buffers_of(os.getpid()))
    first, second = SharedBuffer(16), SharedBuffer(16)
    assert first.name != second.name
    assert len(buffers_of(os.getpid())) == len(before) + 2
    del first, second
    assert sorted(buffers_of(os.getpid())) == before


def test_no_shared_memory_outlives_a_killed_process() -> None:
    code = "from nanorl.engine.shared_buffer import SharedBuffer; b = SharedBuffer(9); print(1, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert len(buffers_of(child.pid)) == 1
    child.send_signal(signal.SIGKILL)
    child.communicate()
    end = time.monotonic() + 10
    while buffers_of(child.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert buffers_of(child.pid) == []


def test_stale_buffers_of_dead_processes_are_removed() -> None:
    """verl 6246: a run that was killed with its whole group left its memory behind."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    stale, foreign = (Path(f"/dev/shm/nanorl-{n}-{done.stdout.strip()}-0") for n in (namespace, namespace + 1))
    stale.write_bytes(b"")
    foreign.write_bytes(b"")
    try:
        SharedBuffer(16)
        assert not stale.exists()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_checksum_knows_every_bit() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert tensor_checksum(values) == tensor_checksum(values.clone())
    assert tensor_checksum(values.T) == tensor_checksum(values.T.contiguous())
    changed = values.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    assert tensor_checksum(changed) != tensor_checksum(values)
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    assert len(tensor_checksum(values.bfloat16())) == 16
