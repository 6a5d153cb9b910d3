"""`nanorl serve`: found by the model's name alone, held by one trainer at a time, and gone without a trace."""

import signal
from pathlib import Path

import pytest

from nanorl.engine.client import EngineClient
from nanorl.engine.registry import live_servers
from nanorl.errors import EngineError
from nanorl.loops.build import build
from nanorl.loops.train import train
from nanorl.tracking.view import PlainView
from tests.loops.commands import descendants, running, wait_gone
from tests.loops.test_train import make_config, metrics_of, without_times


def test_a_server_s_life(tiny_model: Path, shared_engine: str, tmp_path: Path, state_folder: Path) -> None:
    """Design: found by the state file that it leaves; one trainer at a time; SIGTERM ends it and its file."""
    alone = make_config(tiny_model, tmp_path / "alone", f"engine.url={shared_engine}")
    train(alone, PlainView(quiet=True))
    with running(tmp_path / "out", "serve", "--model", str(tiny_model), "--port", "0") as command:
        command.wait_for(live_servers, "state file")
        (record,) = live_servers()
        assert record.process.pid == command.process.pid
        assert "Ready." in command.output
        left = descendants(command.process.pid)

        train(make_config(tiny_model, tmp_path / "found"), PlainView(quiet=True))
        assert f"torch (nanorl serve) {record.url}" in (tmp_path / "found" / "run.log").read_text()
        assert not (tmp_path / "found" / "engine.log").exists()
        assert without_times(metrics_of(tmp_path / "found")) == without_times(metrics_of(tmp_path / "alone"))

        with build(make_config(tiny_model, tmp_path / "first"), PlainView(quiet=True)) as first:
            assert first.engine.url == record.url
            with pytest.raises(EngineError, match=r"used by another run: .*first.*--take-over"):
                train(make_config(tiny_model, tmp_path / "second"), PlainView(quiet=True))
            with EngineClient(record.url) as client:
                assert client.model_info().version == 1  # the refused one has sent nothing
            taken = make_config(tiny_model, tmp_path / "taken", "engine.take_over=true")
            train(taken, PlainView(quiet=True))
            with pytest.raises(EngineError, match="taken over by"):
                first.sync_weights()

        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(10) == 128 + signal.SIGTERM
        wait_gone(left)
        assert live_servers() == []
        assert list((state_folder / "nanorl" / "servers").iterdir()) == []
        assert list((state_folder / "nanorl" / "leases").glob("*.json")) == []
        assert "Traceback" not in command.output
