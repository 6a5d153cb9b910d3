"""The weight session over HTTP: refusals, what arrives, what never does."""

import base64
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nanorl.engine.checksum import tensor_checksum
from nanorl.engine.shared_buffer import SharedBuffer
from nanorl.engine.tensor_payload import FlattenedTensorMetadata, _BucketPickler, serialize_bucket
from tests.engine.embedded import Served, sampled, serve
from tests.engine.test_server_generate import reference_logprobs
from tests.tiny_models import build_tiny_model

PROMPT = [1, 40, 50, 60, 70]
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "sampling_seed": 1}


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=[("qwen3", True), ("llama", False)], ids=["qwen3-tied", "llama-untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, tied = request.param
    return build_tiny_model(tmp_path_factory.mktemp("weights") / "model", tied=tied, architecture=architecture)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serve(folder) as running:
        yield running


@pytest.fixture
def engine(served: Served, folder: Path) -> Iterator[Served]:
    """With the folder's weights as version "default", running, no session open."""
    yield served
    served.ok("/continue_generation", {})
    served.call("/end_weight_update", {})
    served.ok("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "default"})


class Bucket:
    """What the trainer's side sends, over shared memory."""

    alive: ClassVar[list["Bucket"]] = []
    """Senders must keep a buffer until the engine has answered; these are kept for good."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.alive.append(self)
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        sizes = [tensor.nbytes for tensor in self.tensors.values()]
        self.buffer = SharedBuffer(sum(sizes))
        self.metadata: list[FlattenedTensorMetadata] = []
        start = 0
        for (name, tensor), size in zip(self.tensors.items(), sizes, strict=True):
            place = FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + size, size)
            self.metadata.append(place)
            self.buffer.tensor[start : start + size] = tensor.reshape(-1).view(torch.uint8)
            start += size

    def body(self, **fields: Any) -> dict[str, Any]:
        payload = serialize_bucket(self.buffer.tensor, self.metadata, shared_name=self.buffer.name)
        return {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", **fields}


def perturbed(folder: Path, seed: int = 1) -> Any:
    model = load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def update(engine: Served, tensors: dict[str, Tensor], version: str) -> dict[str, Any]:
    engine.ok("/begin_weight_update", {})
    answer = engine.ok("/update_weights_from_tensor", Bucket(tensors).body(weight_version=version))
    engine.ok("/end_weight_update", {})
    return answer


def checksums(engine: Served) -> dict[str, str]:
    return engine.ok("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


def assert_generates_as(engine: Served, model: Any) -> None:
    ids, logprobs = sampled(engine.generate(PROMPT, max_new_tokens=12, sampling_seed=4, ignore_eos=True))
    assert logprobs == pytest.approx(reference_logprobs(model, PROMPT, ids), abs=1e-5)


def refusal(engine: Served, path: str, body: Any) -> str:
    response = engine.call(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["success"] is False
    return response.json()["message"]


def test_session_refusals(engine: Served, folder: Path) -> None:
    body = Bucket(dict(load(folder).named_parameters())).body()
    before = checksums(engine)
    assert "must run between" in refusal(engine, "/update_weights_from_tensor", body)
    assert "no weight-update session is open" in refusal(engine, "/end_weight_update", {})
    assert engine.ok("/begin_weight_update", {"selector": "all"}) == {"success": True, "message": "Success"}
    assert "already open" in refusal(engine, "/begin_weight_update", {})
    assert engine.ok("/end_weight_update", {})["success"] is True
    assert checksums(engine) == before


def test_update_arrives_under_its_version(engine: Served, folder: Path) -> None:
    model = perturbed(folder)
    assert update(engine, dict(model.named_parameters()), "3") == {"success": True, "message": "Success"}
    assert engine.ok("/model_info", method="GET")["weight_version"] == "3"
    assert_generates_as(engine, model)
    answer = engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
    assert answer["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
    held = checksums(engine)
    assert all(held[name] == tensor_checksum(tensor) for name, tensor in model.named_parameters())


def test_buffer_may_be_written_again_at_once(engine: Served, folder: Path) -> None:
    """verl 6688: views that outlive a reused buffer."""
    model = perturbed(folder)
    bucket = Bucket(dict(model.named_parameters()))
    engine.ok("/begin_weight_update", {})
    engine.ok("/update_weights_from_tensor", bucket.body())
    bucket.buffer.tensor.fill_(255)
    engine.ok("/end_weight_update", {})
    assert_generates_as(engine, model)


def test_many_small_buckets_equal_one(engine: Served, folder: Path) -> None:
    """sglang 14178: work after loading, once per bucket, garbles the model."""
    model = perturbed(folder)
    update(engine, dict(model.named_parameters()), "1")
    at_once = checksums(engine)
    update(engine, dict(load(folder).named_parameters()), "2")
    assert checksums(engine) != at_once
    engine.ok("/begin_weight_update", {})
    for name, tensor in model.named_parameters():
        engine.ok("/update_weights_from_tensor", Bucket({name: tensor}).body())
    engine.ok("/end_weight_update", {})
    assert checksums(engine) == at_once


@pytest.mark.parametrize("names", ["all", "without the head"])
def test_head(engine: Served, folder: Path, names: str) -> None:
    """vllm 51665, prime-rl 1765: a tied head not updated, or written twice; an untied one keeps its own values."""
    model = perturbed(folder)
    tied = model.config.tie_word_embeddings
    tensors = dict(model.state_dict())
    if names == "without the head":
        del tensors["lm_head.weight"]
    update(engine, tensors, "1")
    if names == "without the head" and not tied:
        model.lm_head = load(folder).lm_head
    assert_generates_as(engine, model)
    assert ("lm_head.weight" in checksums(engine)) is not tied


def test_other_dtypes_are_cast(engine: Served, folder: Path) -> None:
    model = perturbed(folder)
    rounded = {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}
    update(engine, rounded, "1")
    model.load_state_dict(rounded, strict=False)
    assert_generates_as(engine, model)


def test_list_of_named_tensors(engine: Served, folder: Path) -> None:
    model = perturbed(folder)
    bucket = Bucket(dict(model.named_parameters()))
    views = [
        (m.name, bucket.buffer.tensor[m.start_idx : m.end_idx].view(m.dtype).view(m.shape)) for m in bucket.metadata
    ]
    stream = io.BytesIO()
    _BucketPickler(stream, bucket.buffer.name).dump(views)
    engine.ok("/begin_weight_update", {})
    engine.ok(
        "/update_weights_from_tensor", {"serialized_named_tensors": [base64.b64encode(stream.getvalue()).decode()]}
    )
    engine.ok("/end_weight_update", {})
    assert_generates_as(engine, model)


def test_wrong_shapes_change_nothing(engine: Served, folder: Path) -> None:
    before = checksums(engine)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load(folder).named_parameters()}
    tensors["model.norm.weight"] = torch.zeros(3)
    engine.ok("/begin_weight_update", {})
    message = refusal(engine, "/update_weights_from_tensor", Bucket(tensors).body(weight_version="9"))
    assert "model.norm.weight: expected (64,), got (3,)" in message
    assert checksums(engine) == before
    assert engine.ok("/model_info", method="GET")["weight_version"] == "default"


def test_unknown_names_are_reported(engine: Served, folder: Path) -> None:
    model = perturbed(folder)
    answer = update(engine, {**dict(model.named_parameters()), "vision.weight": torch.zeros(2)}, "1")
    assert answer == {"success": True, "message": "Success, 1 unknown names ignored: vision.weight"}
    assert_generates_as(engine, model)
    engine.ok("/begin_weight_update", {})
    body = Bucket({"vision.weight": torch.zeros(2)}).body()
    assert "None of the 1 names" in refusal(engine, "/update_weights_from_tensor", body)


def system_call() -> str:
    class Command:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    return base64.b64encode(pickle.dumps(Command())).decode()


def wrong_extent() -> str:
    bucket = Bucket({"model.norm.weight": torch.zeros(64)})
    bucket.metadata[0].end_idx = 10_000
    return bucket.body()["serialized_named_tensors"][0]


def gone_memory() -> str:
    bucket = Bucket({"model.norm.weight": torch.zeros(64)})
    payload = bucket.body()["serialized_named_tensors"][0]
    bucket.buffer.close()
    return payload


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (system_call, "system"),
        (lambda: "not base64!", "base64"),
        (lambda: base64.b64encode(b"nonsense").decode(), "can't be opened"),
        (lambda: base64.b64encode(pickle.dumps([1])).decode(), "Expected a bucket"),
        (wrong_extent, "takes 256 bytes"),
        (gone_memory, "FileNotFound"),
    ],
)
def test_bad_payloads_change_nothing(engine: Served, make: Callable[[], str], message: str) -> None:
    before = checksums(engine)
    engine.ok("/begin_weight_update", {})
    body = {"serialized_named_tensors": [make()], "load_format": "flattened_bucket"}
    assert message in refusal(engine, "/update_weights_from_tensor", body)
    engine.ok("/end_weight_update", {})
    assert checksums(engine) == before


def test_other_formats_and_ranks_are_refused(engine: Served) -> None:
    engine.ok("/begin_weight_update", {})
    assert "load_format" in refusal(
        engine, "/update_weights_from_tensor", {"serialized_named_tensors": ["x"], "load_format": "my.loader"}
    )
    assert "one payload" in refusal(engine, "/update_weights_from_tensor", {"serialized_named_tensors": ["x", "y"]})


def test_retracted_requests_go_on_with_new_weights(engine: Served, folder: Path) -> None:
    """Contract 6: what follows the update is the new model's, the keys and values of the old tokens included."""
    old, new = load(folder), perturbed(folder)
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens(20)
    engine.ok("/pause_generation", {"mode": "retract"})
    update(engine, dict(new.named_parameters()), "1")
    assert engine.call("/flush_cache", {}).status_code == 200
    engine.ok("/continue_generation", {})
    answer = pending.result(30)
    ids, logprobs = sampled(answer)
    first, second = answer["meta_info"]["weight_versions"]
    assert (first["version"], second["version"], second["end"]) == ("default", "1", 400)
    change = first["end"]
    assert logprobs[:change] == pytest.approx(reference_logprobs(old, PROMPT, ids)[:change], abs=1e-5)
    assert logprobs[change:] == pytest.approx(reference_logprobs(new, PROMPT, ids)[change:], abs=1e-5)


def test_an_update_without_a_pause_retracts(engine: Served, folder: Path) -> None:
    new = perturbed(folder)
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens(20)
    update(engine, dict(new.named_parameters()), "1")
    answer = pending.result(30)
    ids, logprobs = sampled(answer)
    change = answer["meta_info"]["weight_versions"][1]["start"]
    assert logprobs[change:] == pytest.approx(reference_logprobs(new, PROMPT, ids)[change:], abs=1e-5)
    assert answer["meta_info"]["num_retractions"] == 1


def test_in_place_keeps_old_keys(engine: Served, folder: Path) -> None:
    new = perturbed(folder)
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens(20)
    engine.ok("/pause_generation", {"mode": "in_place"})
    engine.ok("/begin_weight_update", {})
    bucket = Bucket(dict(new.named_parameters()))
    assert "not flushed" in refusal(engine, "/update_weights_from_tensor", bucket.body(weight_version="1"))
    engine.ok("/update_weights_from_tensor", bucket.body(weight_version="2", flush_cache=False))
    engine.ok("/end_weight_update", {})
    engine.ok("/continue_generation", {})
    answer = pending.result(30)
    ids, logprobs = sampled(answer)
    assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == ["default", "2"]
    change = answer["meta_info"]["weight_versions"][1]["start"]
    recomputed = reference_logprobs(new, PROMPT, ids)
    assert max(abs(a - b) for a, b in zip(logprobs[change:], recomputed[change:], strict=True)) > 1e-3


def test_update_can_abort_first(engine: Served, folder: Path) -> None:
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens()
    engine.ok("/begin_weight_update", {})
    body = Bucket(dict(load(folder).named_parameters())).body(abort_all_requests=True)
    engine.ok("/update_weights_from_tensor", body)
    assert pending.result(10)["meta_info"]["finish_reason"]["type"] == "abort"


def test_disk(engine: Served, folder: Path, tmp_path: Path) -> None:
    model = perturbed(folder)
    model.save_pretrained(tmp_path)
    engine.ok("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "5"})
    assert engine.ok("/model_info", method="GET")["weight_version"] == "5"
    assert_generates_as(engine, model)
    assert "safetensors" in refusal(engine, "/update_weights_from_disk", {"model_path": str(tmp_path / "none")})
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert "can't be read" in refusal(engine, "/update_weights_from_disk", {"model_path": str(tmp_path)})


def test_weights_by_name(engine: Served, folder: Path) -> None:
    state = load(folder).state_dict()
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        told = engine.ok("/get_weights_by_name", {"name": name, "truncate_size": 3})
        assert torch.equal(torch.tensor(told), state[name][:3])
    assert engine.call("/get_weights_by_name", {"name": "nope"}).status_code == 400


def test_checker_knows_checksums_only(engine: Served) -> None:
    assert "Unsupported" in refusal(engine, "/weights_checker", {"action": "compare"})
    first, second = (engine.ok("/weights_checker", {})["per_engine_checksum"] for _ in range(2))
    assert first == second


def test_broken_weights_end_requests_and_leave_no_trace(engine: Served, folder: Path) -> None:
    """NaN in the cache would reach later rows through the positions that attention masks."""
    whole = engine.generate([PROMPT, PROMPT * 3], max_new_tokens=40, temperature=0, ignore_eos=True)
    poison = {"model.norm.weight": torch.full((64,), float("nan"))}
    poison["model.layers.0.self_attn.v_proj.weight"] = torch.full((64, 64), float("inf"))
    poison = {n: t for n, t in poison.items() if t.shape == dict(load(folder).named_parameters())[n].shape}
    update(engine, poison, "1")
    (broken,) = engine.generate([PROMPT * 20], max_new_tokens=5)
    assert broken["meta_info"]["finish_reason"]["type"] == "abort"
    assert "not finite" in broken["meta_info"]["finish_reason"]["message"]
    update(engine, dict(load(folder).named_parameters()), "2")
    again = engine.generate([PROMPT, PROMPT * 3], max_new_tokens=40, temperature=0, ignore_eos=True)
    assert [a["output_ids"] for a in again] == [a["output_ids"] for a in whole]
