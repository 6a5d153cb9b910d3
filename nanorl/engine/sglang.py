"""How SGLang is started as the engine: in this environment, or by a command that runs it elsewhere.

SGLang may live in an environment of its own: nanorl only starts a process and speaks HTTP with it. `tools/sglang_cpu.sh
serve` is such a command; it makes SGLang run without a GPU.
"""

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from nanorl.engine.launcher import EngineCommand
from nanorl.engine.ports import HOST
from nanorl.errors import ConfigError

COMMAND_VARIABLE = "NANORL_SGLANG"
"""Environment variable: the command to run instead of `python -m sglang.launch_server`."""

LOADER = "nanorl.engine.sglang_loader.load"
"""Runs inside the server: a weight update as one fused copy. The server is told at its start, each update names it."""

GPU_SHARE = 0.4
"""Of the GPU's memory for weights and KV cache: the trainer, with fp32 weights and Adam, lives on the same GPU."""


def find_sglang(command: str | None = None) -> tuple[str, ...] | None:
    """The words that start SGLang: `command`, else $NANORL_SGLANG, else this environment's package; None: none of them.

    The package is only looked for: importing it would take ten seconds.

    Raises:
        ConfigError: the command can't be run.
    """
    given = command or os.environ.get(COMMAND_VARIABLE)
    if given:
        return _runnable(given)
    if importlib.util.find_spec("sglang") is None:
        return None
    return (sys.executable, "-m", "sglang.launch_server")


def sglang_engine(
    model: str | Path, *flags: str, dtype: str, device: str, port: int = 0, command: str | None = None
) -> EngineCommand:
    """The command of an SGLang server that serves `model` to a trainer of this machine.

    Args:
        model: a folder or hub id.
        flags: any further flags of SGLang; they win over the ones set here.
        dtype: float32 or bfloat16.
        device: cpu or cuda.
        port: 0 takes a free one.
        command: what to run instead of `python -m sglang.launch_server`.

    Raises:
        ConfigError: SGLang is not there.
    """
    words = find_sglang(command)
    if words is None:
        raise ConfigError(
            f"engine.type sglang: {sys.executable} has no sglang package. Install it there (the extra `sglang`), say "
            f"how it is started elsewhere (engine.sglang_command or {COMMAND_VARIABLE}; without a GPU: "
            "tools/sglang_cpu.sh install, then 'tools/sglang_cpu.sh serve'), or use --engine torch."
        )
    own = ["--model-path", str(model), "--host", HOST, "--port", "{port}", "--dtype", dtype]
    # A warm-up request would still run when /model_info answers, and the first sync's flush be refused.
    own += ["--skip-server-warmup"]
    own += ["--device", "cpu"] if device == "cpu" else _gpu_flags(dtype)
    env: dict[str, str] = {}
    if words[0] == sys.executable or not _is_installed():
        own += ["--custom-weight-loader", LOADER]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))}
    return EngineCommand(argv=(*words, *own, *flags), env=env, port=port)


_ROOT = Path(__file__).parents[2]
"""Where this package is found."""


def _is_installed() -> bool:
    """Among other packages, which an SGLang of another environment must not see: then it does without our loader."""
    return _ROOT.name in ("site-packages", "dist-packages")


def _gpu_flags(dtype: str) -> list[str]:
    share = ["--mem-fraction-static", str(GPU_SHARE)]
    # FlashAttention, the default on many GPUs, has no float32.
    return [*share, "--attention-backend", "triton"] if dtype == "float32" else share


def _runnable(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"Expected a command that starts SGLang, got {command!r}: {error}.") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"The command that starts SGLang, {command!r}, can't be run: there is no program {words[:1] or ''}. "
            f"It comes from engine.sglang_command or {COMMAND_VARIABLE}."
        )
    return words
