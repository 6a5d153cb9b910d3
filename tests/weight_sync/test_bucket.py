"""The flat bucket: places, casts, aliases, splitting."""

import pytest
import torch

from nanorl.engine.tensor_payload import deserialize_bucket
from nanorl.errors import WeightSyncError
from nanorl.weight_sync.bucket import FlatBucket, drop_aliases

CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5),
        "flag": torch.tensor([True, False, True]),
        "b": torch.randn(7),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).T,
    }


def read_back(bucket: FlatBucket, index: int) -> dict[str, torch.Tensor]:
    flat, metadata = deserialize_bucket(bucket.payload(index))
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).view(m.shape).clone() for m in metadata}


def test_everything_arrives_in_the_engines_dtype() -> None:
    given = tensors()
    bucket = FlatBucket(given, dtype=torch.bfloat16, device=CPU)
    (layout,) = bucket.layouts
    bucket.fill(layout, given)
    read = read_back(bucket, 0)
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(read[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name
    for m in layout.metadata:
        assert m.start_idx % 16 == 0
        assert m.numel == m.end_idx - m.start_idx == given[m.name].numel() * m.dtype.itemsize


def test_without_a_dtype_tensors_keep_theirs() -> None:
    given = {"a": torch.randn(3).double(), "b": torch.randn(2).half()}
    bucket = FlatBucket(given, dtype=None, device=CPU)
    bucket.fill(bucket.layouts[0], given)
    assert [tensor.dtype for tensor in read_back(bucket, 0).values()] == [torch.float64, torch.float16]


def test_the_handle_is_made_once_and_follows_the_buffer() -> None:
    given = {"a": torch.zeros(4)}
    bucket = FlatBucket(given, dtype=None, device=CPU)
    handles = set()
    for value in range(5):
        bucket.fill(bucket.layouts[0], {"a": torch.full((4,), float(value))})
        handles.add(bucket.payload(0))
        assert read_back(bucket, 0)["a"].tolist() == [value] * 4
    assert len(handles) == 1


def test_splits_by_bytes_over_one_buffer() -> None:
    given = {f"t{i}": torch.full((64,), float(i)) for i in range(10)} | {"big": torch.arange(1000.0)}
    bucket = FlatBucket(given, dtype=None, device=CPU, max_bytes=600)
    assert [len(layout.views) for layout in bucket.layouts] == [2, 2, 2, 2, 2, 1]
    assert bucket.buffer.numel() == 4000
    read: dict[str, torch.Tensor] = {}
    for index, layout in enumerate(bucket.layouts):
        bucket.fill(layout, given)
        read |= read_back(bucket, index)
    assert all(torch.equal(read[name], tensor) for name, tensor in given.items())
    assert (bucket.num_tensors, bucket.num_bytes) == (11, 10 * 256 + 4000)


@pytest.mark.parametrize(("for_loader", "size"), [(True, 512), (False, 4 * 512 + 256)])
def test_parts_share_a_place_only_where_the_engine_is_done_with_one_when_it_answers(
    for_loader: bool, size: int
) -> None:
    """verl 6688: on a GPU SGLang's own loader answers with its copies still queued."""
    given = {f"t{i}": torch.zeros(64, device="meta") for i in range(9)}
    bucket = FlatBucket(given, dtype=None, device=torch.device("meta"), max_bytes=600, for_loader=for_loader)
    ranges = [(m.start_idx, m.end_idx) for layout in bucket.layouts for m in layout.metadata]
    assert bucket.buffer.numel() == size
    assert (len(set(ranges)) == len(ranges)) == (not for_loader)


def test_tied_tensors_go_once_under_the_first_name() -> None:
    embedding = torch.nn.Parameter(torch.randn(4, 3))
    kept = drop_aliases(
        [("embed", embedding), ("head", embedding), ("half", embedding[:2]), ("copy", embedding.clone())]
    )
    assert list(kept) == ["embed", "half", "copy"]
    assert not kept["embed"].requires_grad


def test_changed_shape_or_missing_tensor_is_named() -> None:
    bucket = FlatBucket({"a": torch.zeros(4)}, dtype=None, device=CPU)
    with pytest.raises(WeightSyncError, match=r"a: expected shape \[4\].*got \[5\]"):
        bucket.fill(bucket.layouts[0], {"a": torch.zeros(5)})
    with pytest.raises(WeightSyncError, match=r"a: expected shape .* got nothing"):
        bucket.fill(bucket.layouts[0], {"b": torch.zeros(4)})
    with pytest.raises(WeightSyncError, match="no tensor to send"):
        FlatBucket({}, dtype=None, device=CPU)
