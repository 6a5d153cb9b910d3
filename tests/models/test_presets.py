"""Which model a name stands for, what is refused, and with which words."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanorl.errors import ModelError
from nanorl.models.load import load_causal_lm
from nanorl.models.presets import ON_GPU, QWEN, SMALL_ON_CPU, TINY, check_folder, resolve_model
from nanorl.models.tiny import build_random

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without cached models, whose hub is a closed port."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def set_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def test_a_folder_is_itself_with_the_defaults_of_its_size(folder: Path):
    model = resolve_model(str(folder), has_gpu=False)
    assert (model.path, model.preset, model.note) == (str(folder), TINY, "")
    set_config(folder)
    assert resolve_model(str(folder), has_gpu=False).preset == SMALL_ON_CPU
    assert resolve_model(str(folder), has_gpu=True).preset == ON_GPU


def test_tiny_random_is_built_into_the_cache_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = resolve_model("tiny-random", has_gpu=False)
    assert (model.name, model.preset) == ("tiny-random", TINY)
    assert Path(model.path).is_relative_to(tmp_path)
    check_folder(Path(model.path))


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("config.json", r"no readable config\.json"),
        ("tokenizer.json", "no tokenizer"),
        ("chat_template.jinja", "no chat template"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_name(folder: Path, file: str, complaint: str):
    (folder / file).unlink()
    with pytest.raises(ModelError, match=complaint) as raised:
        resolve_model(str(folder), has_gpu=False)
    assert str(folder) in str(raised.value)


def test_half_a_weight_file_is_refused_before_it_is_loaded(folder: Path):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or half a file: .*Copy or download it again"):
        resolve_model(str(folder), has_gpu=False)


def test_weights_are_refused_where_transformers_would_make_some_up(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight missing; .*down_proj\.weight of shape \[3, 5\], not .*; 2"
    ):
        load_causal_lm(folder, torch.float32)


def test_a_template_within_the_tokenizer_config_counts(folder: Path):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_folder(folder)


def test_a_broken_config_is_refused(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": []}, "nothing known"),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "linear_attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_attention"),
        ({"model_type": "mamba", "state_size": 16}, "mamba"),
        ({"model_type": "falcon_h1", "mamba_d_state": 256}, "falcon_h1"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_what_is_no_full_attention_decoder_is_refused_by_name(folder: Path, changes: dict[str, Any], complaint: str):
    set_config(folder, **changes)
    with pytest.raises(ModelError, match=complaint):
        check_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ["full_attention"] * 2},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
        {"model_type": "phi3", "sliding_window": 262144},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    ],
)
def test_full_attention_decoders_are_taken(folder: Path, changes: dict[str, Any]):
    set_config(folder, **changes)
    assert check_folder(folder)["hidden_size"] == 576


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_cant_be_reached_names_both_ways_out():
    with pytest.raises(ModelError, match=QWEN) as raised:
        resolve_model(QWEN, has_gpu=True)
    assert "folder" in str(raised.value)
    assert "--model tiny" in str(raised.value)


@pytest.mark.parametrize("name", ["tinny", "./nowhere", "/no/such/folder", "~/nowhere/at/all"])
def test_neither_folder_nor_id_is_an_error_without_asking_the_hub(name: str):
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(name, has_gpu=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_hub")
def test_auto_is_tiny_without_a_gpu_and_says_so_where_qwen_cant_be_had():
    without = resolve_model("auto", has_gpu=False)
    assert (without.name, without.preset, without.note) == ("tiny", TINY, "")
    with_gpu = resolve_model("auto", has_gpu=True)
    assert (with_gpu.name, with_gpu.path, with_gpu.preset) == ("tiny", without.path, TINY)
    assert QWEN in with_gpu.note
