"""What a user does wrong: one line that says what and what to do, exit code 2, no traceback, nothing left behind."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nanorl.engine.client import EngineClient
from nanorl.engine.ports import listen_locally
from nanorl.train.checkpoint import checkpoint_path, read_state
from tests.loops.commands import nanorl, own_children
from tests.loops.test_train import metrics_of
from tests.tiny_models import build_tiny_model


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child of this process that was not there before."""
    children = own_children()
    yield
    assert own_children() == children


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that must not succeed."""
    assert nanorl(*words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert captured.err.startswith("error: "), captured.err
    return captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--stepz", "3"], "--steps"),
        (["train", "--group-sise", "3"], "--group-size"),
        (["trian"], "train"),
        (["serve", "--port", "70000"], "--port"),
        (["train", "--steps", "many"], "--steps"),
        (["sync-bench", "--iters", "0"], "--iters"),
    ],
)
def test_a_flag_that_does_not_exist_or_fit(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert nanorl(*words) == 2
    error = capsys.readouterr().err
    assert "Error: " in error
    assert message in error.rsplit("Error: ", 1)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "train.learning_rate=1"], "Unknown config key 'train.learning_rate'. Known: lr, betas"),
        (["--set", "rollout.grup_size=4"], "Did you mean 'rollout.group_size'?"),
        (["--set", "rolout.group_size=4"], "Did you mean 'rollout'?"),
        (["--set", "steps=4"], "Expected --set section.key=value"),
        (["--set", "train.lr=fast"], "train.lr"),
        (["--temperature", "0"], "temperature must be above 0"),
        (["--group-size", "1"], "group_size must be at least 2"),
        (["--steps", "0"], "run.steps"),
        (["--lr", "nan"], "train.lr: expected a finite number"),
        (["--config", "/no/such.toml"], "/no/such.toml"),
        (["--resume", "--run-dir", "/no/such/run"], "'/no/such/run', where no run is"),
        (["--replay", "/no/such/run"], "'/no/such/run', where no run is"),
        (["--model", "/no/such/model"], "no such folder"),
        (["--rollout-only", "--set", "run.replay=runs/x"], "choose one"),
        (["--model", "tiny-random", "--set", "sync.carrier=cuda_ipc"], "cuda_ipc doesn't reach the engine"),
        (
            [
                "--model",
                "tiny-random",
                "--prompts-per-step",
                "2",
                "--group-size",
                "2",
                "--set",
                "train.num_minibatches=5",
            ],
            "train.num_minibatches is 5, but a step has 4 samples",
        ),
    ],
)
def test_settings_that_make_no_sense(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    """OpenRLHF 1250 (a group of one), slime 557 (temperature 0)."""
    assert message in refused(capsys, "train", *words)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer.json", "has no tokenizer (tokenizer.json)"),
        ("chat_template.jinja", "has no chat template"),
        ("model.safetensors", "has no weights (*.safetensors)"),
        ("config.json", "has no readable config.json"),
    ],
)
@pytest.mark.parametrize("command", ["train", "serve", "eval", "check-parity", "sync-bench"])
def test_a_model_folder_that_lacks_something(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, command: str, missing: str, message: str
) -> None:
    for file in tiny_model.iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert not (tmp_path / missing).exists()
    assert message in refused(capsys, command, "--model", str(tmp_path))


class Website(BaseHTTPRequestHandler):
    """Answers everything, as no engine does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base class's name
        """Says nothing."""


@pytest.fixture(scope="module")
def website() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Website) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def free_port() -> int:
    with listen_locally() as listener:
        return listener.getsockname()[1]


def test_a_url_where_nothing_listens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, free_port: int
) -> None:
    words = ["--model", str(tiny_model), "--engine-url", f"http://127.0.0.1:{free_port}"]
    for command in (["train", "--run-dir", str(tmp_path / "run")], ["sync-bench"]):
        message = refused(capsys, *command, *words)
        assert f"127.0.0.1:{free_port}" in message
        assert "nothing listens there. Start an engine with `nanorl serve`, or check the URL" in message


def test_a_start_that_fails_makes_no_folder_and_keeps_the_link(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model: Path,
    website: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--engine-url", website], ["--set", "reward.name=no_module:f"], ["--set", "sync.carrier=cuda_ipc"]):
        refused(capsys, "train", "--model", str(tiny_model), *words)
    assert not (tmp_path / "runs").exists()


def test_a_mistyped_name_is_refused_before_torch_is_imported() -> None:
    """A user's first seconds: torch alone takes several to import."""
    command = "from nanorl.cli import run_command; run_command()"
    for words in (
        ["--replay", "runs/nowhere"],
        ["--resume", "--run-dir", "runs/nowhere"],
        ["--set", "reward.name=arithmetics"],
        ["--engine-url", "localhost"],
    ):
        arguments = [sys.executable, "-X", "importtime", "-c", command, "train", *words]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (ended.returncode, "| torch" in ended.stderr) == (2, False), ended.stderr[-500:]
        assert "error: " in ended.stderr


def test_a_url_where_something_else_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, website: str
) -> None:
    words = ["train", "--run-dir", str(tmp_path / "run"), "--model", str(tiny_model), "--engine-url", website]
    assert "Is it an engine that speaks SGLang's HTTP dialect?" in refused(capsys, *words)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "localhost", "http://127.0.0.1:port", "ftp://127.0.0.1:30000"])
def test_what_is_no_url(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, url: str) -> None:
    words = ["train", "--run-dir", str(tmp_path / "run"), "--model", str(tiny_model), "--engine-url", url]
    message = refused(capsys, *words)
    assert "engine.url" in message
    assert url in message
    assert "http://" in message


@pytest.mark.parametrize("command", ["train", "eval", "check-parity", "sync-bench"])
def test_a_url_of_another_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shared_engine: str, command: str
) -> None:
    """Names and shapes are compared first: the engine gets nothing, and keeps the version that it had."""
    other = build_tiny_model(tmp_path / "other", hidden_size=32)
    with EngineClient(shared_engine) as client:
        before = client.model_info(), client.weights_checksum()
        words = ["--run-dir", str(tmp_path / "run")] if command == "train" else []
        message = refused(capsys, command, "--model", str(other), "--engine-url", shared_engine, *words)
        assert "another model than the trainer's; nothing was sent" in message
        assert "model.embed_tokens.weight: engine [320, 64], trainer [320, 32]" in message
        assert (client.model_info(), client.weights_checksum()) == before


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    with listen_locally() as holder:
        port = holder.getsockname()[1]
        message = refused(capsys, "serve", "--model", str(tiny_model), "--port", str(port))
    assert f"Expected port {port} on 127.0.0.1 to be free" in message
    assert "Choose another port" in message


def test_a_run_folder_where_a_file_is(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder, message in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "run", "Not a directory")):
        assert message in refused(capsys, "train", "--model", str(tiny_model), "--run-dir", str(folder))
    assert (tmp_path / "file").read_text() == "mine"


def test_overwrite_spares_what_no_run_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    words = ["train", "--model", str(tiny_model), "--run-dir", str(tmp_path)]
    assert "or --overwrite to delete" in refused(capsys, *words)
    assert "no run made it" in refused(capsys, *words, "--overwrite")
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_no_space_for_the_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path) -> None:
    """A limit of 0 bytes a file stands for the full disk: it needs no rights, and fails in the same calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        message = refused(capsys, "train", "--model", str(tiny_model), "--run-dir", str(tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"Can't write to the run folder {tmp_path / 'run'}: File too large. Choose another --run-dir" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 768 KiB, where this user may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_later(
    capsys: pytest.CaptureFixture[str], small_disk: Path, tiny_model: Path, shared_engine: str
) -> None:
    """The run ends with a message where a checkpoint doesn't fit; the one before it is whole."""
    words = ["train", "--model", str(tiny_model), "--engine-url", shared_engine, "--run-dir", str(small_disk / "run")]
    words += ["--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4"]
    words += ["--checkpoint-every", "1", "--set", "run.eval_prompts=0"]
    message = refused(capsys, *words)
    checkpoints = small_disk / "run" / "checkpoints"
    assert f"Can't write the checkpoint {checkpoint_path(checkpoints, 2)}: " in message
    assert "Free some space; older ones are untouched" in message
    assert list(checkpoints.iterdir()) == [checkpoint_path(checkpoints, 1)]
    assert read_state(checkpoint_path(checkpoints, 1)).step == 1
    assert [row["step"] for row in metrics_of(small_disk / "run")] == [1, 2]
