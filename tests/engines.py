"""Running engines for tests: the embedded one always, a real SGLang where NANORL_SGLANG_URL names one.

SGLang's tests change its weights, and put the model's own back afterwards.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineProcess, embedded_engine


@dataclass(frozen=True)
class RunningEngine:
    """What a contract test needs to know."""

    url: str
    model: Path
    is_embedded: bool
    pid: int | None = None


EITHER_ENGINE = [
    pytest.param("embedded", id="embedded"),
    pytest.param("sglang", id="sglang", marks=pytest.mark.sglang),
]


@contextlib.contextmanager
def running_engine(kind: str, model: Path) -> Iterator[RunningEngine]:
    """An embedded engine of `model`, or the SGLang that NANORL_SGLANG_URL names with whatever model it serves."""
    if kind == "embedded":
        with EngineProcess(embedded_engine(model)) as process:
            yield RunningEngine(process.url, model, True, process.pid)
        return
    url = os.environ.get("NANORL_SGLANG_URL")
    if not url:
        pytest.skip("NANORL_SGLANG_URL names no running SGLang")
    with EngineClient(url) as client:
        yield RunningEngine(url, Path(client.server_info()["model_path"]), False)
