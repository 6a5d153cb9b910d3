"""Shared by all tests: what this machine lacks is skipped by its marker, with the reason in the report."""

import os
import shutil
import subprocess

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "30000")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `nanorl` does: engines and the test share the cores


def _num_gpus() -> int:
    """NVIDIA GPUs by name, without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the skips."""
    num_gpus = _num_gpus()
    missing = {
        "gpu": "needs an NVIDIA GPU" if num_gpus < 1 else None,
        "multigpu": "needs two NVIDIA GPUs" if num_gpus < 2 else None,
        "sglang": None if "NANORL_SGLANG_URL" in os.environ else "needs a running SGLang: make test-sglang",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
