"""Where the package lies and which of its rooms must do without torch."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nanorl"

TORCH_FREE = (
    "nanorl.errors",
    "nanorl.types",
    "nanorl.config",
    "nanorl.config_load",
    "nanorl.config_text",
    "nanorl.data",
    "nanorl.tokens",
    "nanorl.rewards",
    "nanorl.rollout",
    "nanorl.sessions",
    "nanorl.tracking",
    "nanorl.algo.advantages",
    "nanorl.engine.protocol",
    "nanorl.engine.client",
    "nanorl.engine.router",
    "nanorl.engine.sglang",
)
"""Modules, or packages with all that they hold. Some arrive later than this list."""


def pyproject() -> dict[str, Any]:
    """The tools' configuration."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def modules_of(name: str) -> list[str]:
    """The module of that name, or a package's every module; none where it doesn't exist yet."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir():
        files = sorted(path.rglob("*.py"))
        return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name] if path.with_suffix(".py").exists() else []
