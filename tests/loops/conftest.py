"""One random tiny model and one engine for all tests of the loop: every run syncs its own weights first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorl.engine.launcher import EngineProcess, embedded_engine
from tests.tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path) -> Iterator[str]:
    """The URL of a running engine that computes in fp32."""
    with EngineProcess(embedded_engine(tiny_model)) as process:
        yield process.url


@pytest.fixture(scope="module", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A `nanorl serve` of this machine's user must not be found, nor may the tests leave leases behind."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder
