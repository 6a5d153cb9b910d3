"""Buckets and lists of tensors as the engine opens them; the sender's side is tested with the weight sync."""

import base64
import io
import pickle

import pytest
import torch

from nanorl.engine import checksum
from nanorl.engine.checksum import tensor_checksum
from nanorl.engine.shared_buffer import SharedBuffer
from nanorl.engine.tensor_payload import (
    FlattenedTensorMetadata,
    _BucketPickler,
    deserialize_bucket,
    deserialize_named_tensors,
    serialize_bucket,
)
from nanorl.engine.weights import WeightStore, overall_checksum, split_bucket
from nanorl.errors import WeightSyncError


@pytest.fixture
def buffer() -> SharedBuffer:
    return SharedBuffer(64)


def place(start: int, end: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> FlattenedTensorMetadata:
    return FlattenedTensorMetadata("w", torch.Size(shape), dtype, start, end, end - start)


def test_round_trip_shares_memory(buffer: SharedBuffer) -> None:
    payload = serialize_bucket(buffer.tensor, [place(0, 16, (2, 2))], shared_name=buffer.name)
    for _ in range(3):  # one handle serves any number of syncs
        ((name, opened),) = split_bucket(*deserialize_bucket(payload))
        assert (name, opened.shape, opened.dtype) == ("w", (2, 2), torch.float32)
        buffer.tensor[:16].view(torch.float32).add_(1.0)
        assert torch.equal(opened.reshape(-1), buffer.tensor[:16].view(torch.float32))


def test_stream_names_sglangs_class(buffer: SharedBuffer) -> None:
    payload = serialize_bucket(buffer.tensor, [place(0, 16, (4,))], shared_name=buffer.name)
    stream = base64.b64decode(payload)
    assert b"sglang.srt.weight_sync.tensor_bucket" in stream
    assert b"nanorl.engine" not in stream


def test_unaligned_places_are_read_all_the_same(buffer: SharedBuffer) -> None:
    buffer.tensor[3:7] = torch.tensor([1.5]).view(torch.uint8)
    ((_, opened),) = split_bucket(buffer.tensor, [place(3, 7, (1,))])
    assert opened.tolist() == [1.5]


@pytest.mark.parametrize(("start", "end", "shape"), [(0, 16, (3,)), (60, 76, (4,)), (16, 0, (4,)), (-4, 12, (4,))])
def test_metadata_must_fit(buffer: SharedBuffer, start: int, end: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightSyncError, match="w: "):
        split_bucket(buffer.tensor, [place(start, end, shape)])


def test_named_list(buffer: SharedBuffer) -> None:
    stream = io.BytesIO()
    _BucketPickler(stream, buffer.name).dump([("a", buffer.tensor[:8].view(torch.float32))])
    ((name, opened),) = deserialize_named_tensors(base64.b64encode(stream.getvalue()).decode())
    buffer.tensor[:4] = torch.tensor([2.5]).view(torch.uint8)
    assert (name, opened[0].item()) == ("a", 2.5)


@pytest.mark.parametrize("payload", [{"flattened_tensor": 1, "metadata": []}, [1, 2], "text", ["ab"], [("a",)]])
def test_other_objects_are_refused(payload: object) -> None:
    encoded = base64.b64encode(pickle.dumps(payload)).decode()
    with pytest.raises(WeightSyncError, match="Expected"):
        deserialize_bucket(encoded)
    if payload != ["ab"] and not isinstance(payload, dict):
        with pytest.raises(WeightSyncError, match="Expected a list"):
            deserialize_named_tensors(encoded)


@pytest.mark.parametrize("function", [eval, exec, open, torch.load, torch.jit.load, io.open_code, pickle.loads])
def test_callables_are_blocked_by_name(function: object) -> None:
    with pytest.raises(WeightSyncError, match=getattr(function, "__name__", "")):
        deserialize_bucket(base64.b64encode(pickle.dumps(function)).decode())


def test_checksum_sees_order_place_and_bits() -> None:
    base = torch.arange(1000, dtype=torch.float32)
    swapped = base.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    negative_zero = base.clone()
    negative_zero[0] = -0.0
    others = [swapped, negative_zero, base[:-1], base + 1e-4]
    assert len({tensor_checksum(tensor, "cuda") for tensor in (base, *others)}) == 5
    assert len({tensor_checksum(tensor) for tensor in (base, *others)}) == 5
    assert tensor_checksum(base.reshape(10, 100).t().contiguous().t()) == tensor_checksum(base)


def test_overall_checksum_needs_no_order() -> None:
    assert overall_checksum({"a": "1", "b": "2"}) == overall_checksum({"b": "2", "a": "1"})
    assert overall_checksum({"a": "1", "b": "2"}) != overall_checksum({"a": "2", "b": "1"})


def test_store_lists_tied_tensors_once() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 3, bias=False), "head": torch.nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    store = WeightStore(model)
    assert list(store.tensors) == ["embed.weight"]
    assert store.aliases == {"head.weight": "embed.weight"}
    one, two = torch.ones(3, 2), torch.full((3, 2), 2.0)
    pairs, _ = store.plan([("embed.weight", one), ("head.weight", two)])
    assert [value is one for _, value in pairs] == [True]
    pairs, _ = store.plan([("head.weight", two)])
    store.copy(pairs)
    assert torch.equal(store.tensors["embed.weight"], two)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.arange(5, dtype=torch.uint8), "5378e41554869438"),
        (torch.arange(10.0), "3015603431603089"),
        (torch.arange(20000, dtype=torch.int32) * -7, "50c76a30558d1e5d"),
        (torch.zeros(0), "0000000000000000"),
    ],
)
def test_the_checksum_of_a_gpu_is_that_of_sglangs_kernel(tensor: torch.Tensor, expected: str) -> None:
    """Expected: what SGLang 0.5.23's Triton kernel gives in Triton's interpreter."""
    assert tensor_checksum(tensor, "cuda") == expected


def test_the_checksum_of_a_gpu_does_not_depend_on_how_much_is_in_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100_000, dtype=torch.int32)
    whole = tensor_checksum(tensor, "cuda")
    monkeypatch.setattr(checksum, "_CHUNK", 16384)
    assert tensor_checksum(tensor, "cuda") == whole
