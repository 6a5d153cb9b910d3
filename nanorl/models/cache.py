"""Folders that are built once: under a lock, whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from nanorl.errors import ModelError


def cache_folder() -> Path:
    """Where nanorl keeps what can be made again: $XDG_CACHE_HOME/nanorl, or ~/.cache/nanorl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorl"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The folder, built by `build(temporary folder)` if it isn't there yet.

    Two processes at once build it once: the second waits. The finished folder appears by a rename, so that a build that
    was killed leaves only a temporary folder, which the next build removes.

    Raises:
        ModelError: the folder can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _build_atomically(folder, build)
    except OSError as error:
        raise ModelError(
            f"Can't build a model in {folder}: {error}. Make room, or set XDG_CACHE_HOME to a writable folder."
        ) from error
    return folder


def _build_atomically(folder: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}-"
    for stale in folder.parent.glob(f"{prefix}*"):  # we hold the lock: whoever made it was killed
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)  # mkdtemp's folders are closed to others
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
