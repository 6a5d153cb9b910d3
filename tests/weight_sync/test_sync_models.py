"""Tied and untied heads, a half-precision engine under fp32 master weights, an engine of another model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineProcess, embedded_engine
from nanorl.errors import WeightSyncError
from nanorl.weight_sync.shared_memory import SharedMemorySync
from tests.tiny_models import build_tiny_model

IDS = [5, 9, 100, 33, 7, 64, 200, 150]


def expected_logprobs(model: torch.nn.Module, prompt_len: int) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([IDS])).logits[0].float(), -1)
    return logprobs[range(prompt_len - 1, len(IDS) - 1), IDS[prompt_len:]].tolist()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_untied_head_moves_on_its_own(architecture: str, tmp_path: Path) -> None:
    """vllm 51665, prime-rl 1765: embedding and head are perturbed apart, and stay apart after saving and loading."""
    folder = build_tiny_model(tmp_path / "model", tied=False, architecture=architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with EngineProcess(embedded_engine(folder)) as engine, EngineClient(engine.url) as client:
        sync = SharedMemorySync(client)
        with torch.no_grad():
            head = model.get_parameter("lm_head.weight")
            head.add_(torch.randn_like(head) * 0.05)
            model.get_parameter("model.embed_tokens.weight").mul_(1.1)
        sync.sync(model.state_dict().items(), 1)
        assert client.score([IDS], [3], 1.0)[0] == pytest.approx(expected_logprobs(model, 3), abs=1e-4)
        assert sync.verify(model.state_dict().items()) == len(list(model.parameters()))
    model.save_pretrained(tmp_path / "saved")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert expected_logprobs(reloaded, 3) == expected_logprobs(model, 3)


def test_fp32_master_weights_reach_a_bf16_engine_rounded_once(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with EngineProcess(embedded_engine(folder, "--dtype", "bfloat16")) as engine, EngineClient(engine.url) as client:
        sync = SharedMemorySync(client)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        report = sync.sync(model.state_dict().items(), 1)
        assert report.num_bytes == 2 * sum(p.numel() for p in model.parameters())
        assert sync.verify(model.state_dict().items()) == report.num_tensors
        assert client.score([IDS], [3], 1.0)[0] == pytest.approx(expected_logprobs(model.bfloat16(), 3), abs=0.1)


def test_an_engine_of_another_model_gets_nothing(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model")
    other = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "other", hidden_size=128))
    with EngineProcess(embedded_engine(folder)) as engine, EngineClient(engine.url) as client:
        with pytest.raises(
            WeightSyncError, match=r"serves .*/model, another model than the trainer's; nothing was sent"
        ):
            SharedMemorySync(client).sync(other.state_dict().items(), 1)
        assert client.model_info().version == 0
