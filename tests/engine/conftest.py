"""Models and engines that the engine's tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiny_models import build_tiny_model

if TYPE_CHECKING:
    from tests.engine.embedded import Served


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    """The same weights as plain transformers runs them: what the engine is compared with."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def shared_engine(tiny_folder: Path) -> "Iterator[Served]":
    from tests.engine.embedded import serve

    with serve(tiny_folder) as served:
        yield served


@pytest.fixture
def engine(shared_engine: "Served") -> "Served":
    """An engine with the folder's weights, idle and running; tests that change weights start their own."""
    assert not shared_engine.engine.core.batch.sequences
    assert shared_engine.engine.core.paused is None
    return shared_engine
