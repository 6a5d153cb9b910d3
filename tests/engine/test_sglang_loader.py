"""The loader that runs inside SGLang: what it records is what it repeats, and what it can't repeat it leaves alone."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from nanorl.engine import sglang_loader
from nanorl.engine.tensor_payload import FlattenedTensorMetadata, deserialize_named_tensors
from nanorl.weight_sync.bucket import FlatBucket


class Fused(nn.Module):
    """Keeps parameters as SGLang does: q/k/v as one, the vocabulary padded; counts its own loads."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 4, dtype=dtype))
        self.embed = nn.Parameter(torch.zeros(8, 4, dtype=dtype))
        self.num_loads = 0

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.num_loads += 1
        for name, tensor in weights:
            if name == "embed":
                self.embed[: len(tensor)].copy_(tensor)
            else:
                row = {"q": 0, "k": 2, "v": 4}[name]
                self.qkv[row : row + 2].copy_(self.prepared(tensor))

    def prepared(self, tensor: Tensor) -> Tensor:
        return tensor


class Casting(Fused):
    """Changes what it copies, so that the bucket is not the source of its copies."""

    def prepared(self, tensor: Tensor) -> Tensor:
        return tensor * 2


class Deriving(Fused):
    """Computes something of its own from the weights afterwards, as some of SGLang's models do."""

    def post_load_weights(self) -> None:
        """Its presence is what counts."""


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sglang_loader, "_plans", {})


def weights(seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 4, generator=noise) for name, rows in (("q", 2), ("embed", 5), ("k", 2), ("v", 2))}


def send(model: nn.Module, bucket: FlatBucket, tensors: dict[str, Tensor]) -> None:
    for index, layout in enumerate(bucket.layouts):
        bucket.fill(layout, tensors)
        sglang_loader.load(model, deserialize_named_tensors(bucket.payload(index)))


def make(tensors: dict[str, Tensor], max_bytes: int | None = None) -> FlatBucket:
    cpu = torch.device("cpu")
    return FlatBucket(tensors, dtype=torch.float32, device=cpu, max_bytes=max_bytes, for_loader=True)


def expect(model: Fused, tensors: dict[str, Tensor], factor: float = 1.0) -> None:
    qkv = torch.cat([tensors["q"], tensors["k"], tensors["v"]]) * factor
    assert torch.equal(model.qkv, qkv)
    assert torch.equal(model.embed, torch.cat([tensors["embed"], torch.zeros(3, 4)]))


@pytest.mark.parametrize("max_bytes", [None, 300])
def test_the_second_update_repeats_the_first_without_the_model(max_bytes: int | None):
    """sglang 14178: many small buckets come to the same as one."""
    model, bucket = Fused(), make(weights(0), max_bytes)
    assert len(bucket.layouts) == (1 if max_bytes is None else 4)
    send(model, bucket, weights(0))
    expect(model, weights(0))
    loads = model.num_loads
    for seed in (1, 2):
        send(model, bucket, weights(seed))
        expect(model, weights(seed))
    assert model.num_loads == loads == len(bucket.layouts)


def test_a_new_trainers_bucket_is_read_where_it_lies():
    model = Fused()
    for seed in (0, 1, 2):
        bucket = make(weights(seed))
        send(model, bucket, weights(seed))
        expect(model, weights(seed))
        bucket.close()
    assert model.num_loads == 1


def test_weights_do_not_change_with_the_bucket_after_the_update():
    """verl 6688: views must not outlive the answer."""
    model, bucket = Fused(), make(weights(0))
    for seed in (0, 1):
        send(model, bucket, weights(seed))
    bucket.buffer.zero_()
    expect(model, weights(1))


@pytest.mark.parametrize(("kind", "factor"), [(Casting, 2.0), (Deriving, 1.0)])
def test_a_model_that_does_more_than_copy_keeps_its_own_way(kind: type[Fused], factor: float):
    model, bucket = kind(), make(weights(0))
    for seed in (0, 1, 2):
        send(model, bucket, weights(seed))
        expect(model, weights(seed), factor)
    assert model.num_loads == 3


def test_a_parameter_of_another_dtype_is_cast_as_it_was():
    model, bucket = Fused(torch.bfloat16), make(weights(0))
    for seed in (0, 1):
        send(model, bucket, weights(seed))
    assert torch.equal(model.embed[:5], weights(1)["embed"].bfloat16())


def test_another_model_under_the_same_layout_is_recorded_anew():
    first, second, bucket = Fused(), Fused(), make(weights(0))
    send(first, bucket, weights(0))
    send(second, bucket, weights(1))
    expect(first, weights(0))
    expect(second, weights(1))


def test_metadata_survives_the_trip():
    """A layout is read back to the shapes and dtypes it was made from."""
    bucket = make(weights(3))
    ((layout, flat),) = deserialize_named_tensors(bucket.payload(0))
    bucket.fill(bucket.layouts[0], weights(3))
    views = dict(sglang_loader._views(layout, flat))
    assert [m.name for m in bucket.layouts[0].metadata] == list(views)
    assert all(isinstance(m, FlattenedTensorMetadata) for m in bucket.layouts[0].metadata)
    assert all(torch.equal(views[name], tensor) for name, tensor in weights(3).items())
