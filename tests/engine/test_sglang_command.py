"""The command that starts SGLang: found without importing it, wherever it lives; the user's flags win."""

import sys
from pathlib import Path

import pytest

from nanorl.config import Config
from nanorl.config_load import load_config
from nanorl.engine.launcher import EngineCommand, EngineProcess
from nanorl.engine.sglang import COMMAND_VARIABLE, find_sglang, sglang_engine
from nanorl.errors import ConfigError, EngineError
from nanorl.loops.engine import engine_command, engine_type
from nanorl.models.presets import Preset, ResolvedModel

PRESET = Preset(dtype="float32", lr=1e-3, prompts_per_step=1, group_size=2, max_new_tokens=1, num_minibatches=1)


@pytest.fixture(autouse=True)
def no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name that can't be imported."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))


def config_of(*sets: str, device: str = "cpu") -> Config:
    return load_config(None, [f"model.device={device}", "model.dtype=bfloat16", *sets])


def model_of(path: str = "/models/m") -> ResolvedModel:
    return ResolvedModel(name="m", path=path, preset=PRESET)


def test_this_environment_s_package_is_found_and_not_imported(package: None) -> None:
    assert find_sglang() == (sys.executable, "-m", "sglang.launch_server")
    assert "sglang" not in sys.modules


def test_a_command_comes_before_the_package(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "env -i 'a b'")
    assert find_sglang() == ("env", "-i", "a b")
    assert find_sglang("true serve") == ("true", "serve")


@pytest.mark.parametrize("command", ["/no/such/program serve", "'unclosed"])
def test_a_command_that_can_t_be_run(command: str) -> None:
    with pytest.raises(ConfigError, match="command that starts SGLang"):
        find_sglang(command)


@pytest.mark.skipif(find_sglang() is not None, reason="the package is here")
def test_no_sglang_names_every_way_out() -> None:
    assert find_sglang() is None
    with pytest.raises(
        ConfigError, match=r"no sglang package.*engine\.sglang_command or NANORL_SGLANG.*--engine torch"
    ):
        sglang_engine("/models/m", dtype="float32", device="cpu")


def test_flags_for_a_gpu_that_the_trainer_shares(package: None) -> None:
    argv = sglang_engine("/models/m", "--tp-size", "2", dtype="bfloat16", device="cuda").argv
    assert argv[argv.index("--mem-fraction-static") + 1] == "0.4"
    assert argv[argv.index("--dtype") + 1] == "bfloat16"
    assert argv[argv.index("--port") + 1] == "{port}"
    assert "--attention-backend" not in argv
    assert argv[-2:] == ("--tp-size", "2")  # the user's last: they win
    assert "triton" in sglang_engine("/models/m", dtype="float32", device="cuda").argv


def test_auto_takes_sglang_where_a_gpu_and_sglang_are(package: None) -> None:
    assert engine_type(config_of(device="cuda")) == "sglang"
    assert engine_type(config_of()) == "torch"
    assert engine_type(config_of("engine.type=torch", device="cuda")) == "torch"
    assert engine_type(config_of("engine.type=sglang")) == "sglang"


@pytest.mark.parametrize("kind", ["torch", "sglang"])
def test_further_flags_reach_either_engine(package: None, kind: str) -> None:
    config = config_of(f"engine.type={kind}", "engine.flags=--context-length 99 --x 'a b'")
    assert engine_command(config, model_of()).argv[-4:] == ("--context-length", "99", "--x", "a b")
    with pytest.raises(ConfigError, match=r"engine\.flags: expected flags as on a command line"):
        engine_command(config_of(f"engine.type={kind}", 'engine.flags="\'"'), model_of())


DEATHS = {
    "the port is taken": "[2026-12-01 07:29:57] ERROR:    [Errno 98] error while attempting to bind on address "
    "('127.0.0.1', 44379): [errno 98] address already in use",
    "not enough memory": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    "the model can't be found": "OSError: We couldn't connect to 'https://huggingface.co' to load the files, "
    "and couldn't find them in the cached files.",
    "a package is missing or of the wrong version": "Exception: sglang-kernel is installed with version 0.4.1, which "
    "is less than the minimum required version 0.4.9. Please reinstall the latest version",
    "a flag that the engine doesn't know": "sglang serve: error: unrecognized arguments: --no-such-flag",
}
"""SGLang 0.5.23's own words."""

IN_PASSING = (
    "[2026-12-01 07:27:46] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed "
    "(ModuleNotFoundError: No module named 'openai_harmony')"
)


@pytest.mark.parametrize("cause", DEATHS)
def test_what_sglang_prints_becomes_a_cause(cause: str, tmp_path: Path) -> None:
    code = f"print({IN_PASSING!r}); print({DEATHS[cause]!r}); raise SystemExit(1)"
    engine = EngineProcess(EngineCommand(argv=(sys.executable, "-c", code)), log_path=tmp_path / "log")
    with pytest.raises(EngineError, match=f"exit code 1: most likely {cause}"):
        engine.start()


def test_what_is_logged_in_passing_is_no_cause(tmp_path: Path) -> None:
    code = f"print({IN_PASSING!r}); raise SystemExit(1)"
    engine = EngineProcess(EngineCommand(argv=(sys.executable, "-c", code)), log_path=tmp_path / "log")
    with pytest.raises(EngineError, match="the cause should stand in its log"):
        engine.start()


def test_an_earlier_start_s_log_is_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA out of memory\n")
    engine = EngineProcess(EngineCommand(argv=(sys.executable, "-c", "raise SystemExit(1)")), log_path=log)
    with pytest.raises(EngineError, match=r"the cause should stand in its log(.|\n)*is empty"):
        engine.start()
