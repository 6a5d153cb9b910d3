"""The folder of one run: configuration, versions, metrics, log files."""

import importlib.metadata
import json
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from nanorl.errors import CheckpointError, ConfigError

WRITTEN = ("config.json", "versions.json", "metrics.jsonl", "engine.log", "nonfinite-*.jsonl")
"""Everything a run writes into its folder."""

PACKAGES = ("torch", "transformers", "sglang", "numpy", "msgspec")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def engine_log(self) -> Path:
        """What an engine of our own prints."""
        return self.path / "engine.log"


def create_run_folder(path: str | None, model_name: str, *, overwrite: bool) -> RunFolder:
    """Makes an empty run folder, `runs/<time>-<model>` where no path is given.

    Raises:
        ConfigError: the folder holds something already and `overwrite` is not set.
        CheckpointError: it can't be written to.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(model_name).name}"
    folder = RunFolder(Path(path) if path else _unused(Path("runs") / name))
    try:
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            if not overwrite or not folder.path.is_dir():
                raise ConfigError(
                    f"Expected a new or empty run folder, {folder.path} is used already. "
                    "Choose another --run-dir, or --overwrite to delete what an earlier run left there."
                )
            _clear(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"Can't write to the run folder {folder.path}: {error}. Choose another --run-dir.") from None
    return folder


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that decide numbers, and the git revision of the working folder."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        found["nanorl_git"] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass  # installed without its repository: the package version says it
    return found


def _unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that doesn't exist: two runs may start within a second."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _clear(folder: RunFolder) -> None:
    """Removes what a run writes, and only where nothing else lies there: a mistyped --run-dir must not cost files."""
    foreign = sorted(p.name for p in folder.path.iterdir() if not any(p.match(pattern) for pattern in WRITTEN))
    if foreign:
        raise ConfigError(f"{folder.path} holds files that no run wrote ({', '.join(foreign[:3])}): it is not overwritten")
    for path in folder.path.iterdir():
        path.unlink()
