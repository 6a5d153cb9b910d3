"""An SGLang that nanorl starts itself: flags passed through, found by others, restarted, and nothing left of it."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanorl.engine.client import EngineClient
from nanorl.engine.generation import GenerationClient
from nanorl.engine.protocol import GenerateRequest, SamplingParams
from nanorl.engine.registry import live_servers
from nanorl.engine.sglang import COMMAND_VARIABLE, LOADER
from nanorl.errors import EngineError
from nanorl.loops.build import Run
from nanorl.loops.train import train
from nanorl.tracking.view import PlainView
from nanorl.weight_sync.base import SyncReport
from nanorl.weight_sync.shared_memory import SharedMemorySync
from tests.loops.commands import descendants, own_children, running, wait_gone
from tests.loops.test_train import make_config, metrics_of
from tests.tiny_models import build_tiny_model

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(COMMAND_VARIABLE not in os.environ, reason=f"{COMMAND_VARIABLE} says not how to start SGLang"),
]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_server_s_life(number: signal.Signals, tmp_path: Path, state_folder: Path) -> None:
    """AReaL 622, prime-rl 2158: gone within 10 s with a request in flight, the port free. Untied, with our loader."""
    folder = build_tiny_model(tmp_path / "model", tied=False, architecture="llama")
    words = ["serve", "--engine", "sglang", "--port", "0", "--model", str(folder), "--", "--context-length", "256"]
    with running(tmp_path / "out", *words) as command:
        command.wait_for(live_servers, "state file", within_s=120)
        (record,) = live_servers()
        assert record.engine == "sglang"
        with EngineClient(record.url) as client:
            info = client.server_info()
            assert (info["context_length"], info["served_model_name"]) == (256, str(folder))
            assert info["custom_weight_loader"] == [LOADER]
            sync_and_compare(client, folder)
            request = threading.Thread(target=ask_and_lose_it, args=[record.url])
            request.start()
            while client.queue_lengths().get("running") != 8:
                time.sleep(0.01)
            left = descendants(command.process.pid)
            assert len(left) >= 4  # guard, server, scheduler, detokenizer
            if number == signal.SIGINT:
                command.press_ctrl_c()
            else:
                command.process.send_signal(number)
            command.process.wait(15)
            wait_gone(left, within_s=10.0)
            request.join(20)
            with pytest.raises(EngineError, match="nothing listens there"):
                client.model_info()


def ask_and_lose_it(url: str) -> None:
    request = GenerateRequest(input_ids=[5, 6], sampling_params=SamplingParams(max_new_tokens=240, ignore_eos=True))

    async def run() -> None:
        async with GenerationClient(url) as generation:
            await generation.generate([request] * 8)

    with contextlib.suppress(EngineError):
        asyncio.run(run())


def sync_and_compare(client: EngineClient, folder: Path) -> None:
    """vllm 51665, prime-rl 1765: embedding and head apart; by checksum, and by values, which SGLang tells for Llama."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sync = SharedMemorySync(client)
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        sync.sync(model.state_dict().items(), version)
        assert sync.verify(model.state_dict().items()) == len(list(model.parameters()))
    ids = [5, 9, 100, 33, 7]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    expected = logprobs[[1, 2, 3], ids[2:]].tolist()
    assert client.score([ids], [2], 1.0)[0] == pytest.approx(expected, abs=1e-4)
    held = client.get_weights_by_name("model.norm.weight")
    assert held == model.state_dict()["model.norm.weight"].tolist()


def test_a_run_restarts_its_own_sglang(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """slime 1632, miles 868: its scheduler is killed after a sync; the next step's prompts are sampled all the same."""
    original = Run.sync_weights

    def kill_after_the_second(self: Run) -> SyncReport:
        report = original(self)
        if report.version == 2:
            process = self.engine.process
            assert process is not None
            pids = descendants(process.pid or 0)
            (scheduler,) = [p for p in pids if b"scheduler" in Path(f"/proc/{p}/cmdline").read_bytes()]
            os.kill(scheduler, signal.SIGKILL)
        return report

    monkeypatch.setattr(Run, "sync_weights", kill_after_the_second)
    children = own_children()
    train(make_config(tiny_model, tmp_path / "run", "engine.type=sglang", "run.eval_prompts=0"), PlainView(quiet=True))
    assert own_children() == children
    rows = metrics_of(tmp_path / "run")
    assert [(row["weight_version"], row["engine/num_restarts"]) for row in rows] == [(2, 0), (3, 1)]
    assert all(0 < row["train/mismatch/max"] < 1e-4 for row in rows)
