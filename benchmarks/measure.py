"""Runs `nanorl train` as a user would and reads what it left: shared by the scripts beside it."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One run."""

    wall_s: float
    peak_mb: float
    """Largest sum of the resident memory of the process and everything it started."""
    steps: list[dict[str, Any]]
    """metrics.jsonl."""

    def median_of(self, metric: str) -> float:
        """Over the steps."""
        return median(step[metric] for step in self.steps)


def train(arguments: Sequence[str], env: dict[str, str] | None = None, loop: str = "train") -> Measured:
    """`nanorl train ARGUMENTS`, or another `loop`, in a folder of its own; raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory(prefix="nanorl-bench-") as folder:
        command = [str(Path(sys.executable).with_name("nanorl")), loop, "--run-dir", f"{folder}/run", *arguments]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        peak = [0.0]
        threading.Thread(target=_watch, args=(process, peak), daemon=True).start()
        output, _ = process.communicate(timeout=1800)
        wall_s = time.perf_counter() - start
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return Measured(wall_s, peak[0], [json.loads(line) for line in lines])


def steps_s(run: Measured) -> float:
    """Wall time of all steps, without start and evaluations."""
    return sum(step["time/step_s"] for step in run.steps)


def _watch(process: subprocess.Popen[str], peak: list[float]) -> None:
    while process.poll() is None:
        peak[0] = max(peak[0], sum(_resident_mb(pid) for pid in _tree(process.pid)))
        time.sleep(0.1)


def _tree(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return [pid, *(p for child in children for p in _tree(child))]


def _resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
    except (OSError, IndexError):
        return 0.0
