"""The torch-free rooms import where torch is absent, and the tools' lists name all of them."""

import subprocess
import sys

import pytest

from tests.architecture.layout import ROOT, TORCH_FREE, modules_of, pyproject

BLOCK_AND_IMPORT = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is blocked", name=name)

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {"mlflow", "prometheus_client", "tensorboard", "wandb"}:  # extras
            raise
"""


def import_without_torch(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK_AND_IMPORT, *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)


@pytest.mark.parametrize("room", [room for room in TORCH_FREE if modules_of(room)])
def test_room_imports_without_torch(room: str):
    result = import_without_torch(*modules_of(room))
    assert result.returncode == 0, result.stderr


def test_the_blocker_blocks():
    result = import_without_torch("nanorl.algo.losses")
    assert result.returncode != 0
    assert "torch is blocked" in result.stderr


def test_the_import_contract_names_every_torch_free_room():
    contracts = pyproject()["importlinter"]["contracts"]
    [forbidden] = [contract for contract in contracts if contract["type"] == "forbidden"]
    assert {room for room in TORCH_FREE if modules_of(room)} <= set(forbidden["source_modules"]) <= set(TORCH_FREE)


def test_pyright_is_strict_in_every_torch_free_room():
    strict = [path.removesuffix(".py").replace("/", ".") for path in pyproject()["pyright"]["strict"]]
    assert sorted(strict) == sorted(TORCH_FREE)
