"""Stands in for sglang-kernel on a CPU: SGLang imports a few names, and then takes its native PyTorch layers."""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+stand-in"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A CPU kernel's name can be imported, but not called."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: this stand-in holds no kernels; take another backend")

    return missing
