"""Which engine a command uses: the URL it was given, a live `nanorl serve` of the same model, or one of its own."""

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanorl.config import Config
from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineCommand, EngineProcess, embedded_engine
from nanorl.engine.registry import Lease, acquire_lease, check_lease, find_server
from nanorl.engine.sglang import find_sglang, sglang_engine
from nanorl.errors import ConfigError, EngineError, WeightSyncError
from nanorl.models.presets import ResolvedModel
from nanorl.weight_sync.carriers import choose_carrier, reaching_carriers

FIRST_CONTACT_S = 15.0
"""A server that doesn't tell about itself within this is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandle:
    """A server that answers."""

    url: str
    description: str
    """For the header: which kind, whose, where."""
    context_length: int
    """Tokens that prompt and response together may have."""
    is_embedded: bool
    """nanorl's own engine, whoever started it."""
    dtype: str | None
    """What the engine computes in, where it says so."""
    process: EngineProcess | None = None
    """The engine where it is our own."""
    lease: Lease | None = None
    """Our hold on an engine that somebody else started."""

    def check(self) -> None:
        """Raises: EngineError where our own engine has died, or another run has taken the server over."""
        if self.process is not None:
            self.process.check_alive()
        if self.lease is not None:
            check_lease(self.lease)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Where a call fails because our own engine has died, its death is the error, with the end of its log."""
        try:
            yield
        except (EngineError, WeightSyncError):
            if self.process is not None:
                self.process.wait_for_death(1.0)
                self.process.check_alive()
            raise


def check_reach(config: Config) -> None:
    """What can be known of engine and carrier before anything is started or written; `config` is resolved.

    Raises:
        EngineError: nothing that is an engine answers at engine.url.
        WeightSyncError: sync.carrier doesn't reach the engine.
    """
    url, device = config.engine.url or "http://127.0.0.1", config.model.device
    engine_device = device
    if config.engine.url:
        with EngineClient(url, timeout_s=FIRST_CONTACT_S) as client:
            engine_device = str(client.server_info().get("device", "cuda"))
    choose_carrier(config.sync.carrier, reaching_carriers(url, engine_device, device), url)


@contextlib.contextmanager
def acquire_engine(config: Config, model: ResolvedModel, log_path: Path, owner: str) -> Iterator[EngineHandle]:
    """The engine for one run, leased to it; one that was started here is stopped at the end.

    Raises:
        EngineError: nothing answers at the URL, the server is held by another run, or our own didn't start.
        ConfigError: an engine was asked for that this machine can't run.
    """
    wanted = None if config.engine.type == "auto" else config.engine.type
    url = config.engine.url or find_server(model.path, wanted)
    if url is None:
        command = engine_command(config, model)
        with EngineProcess(command, log_path=log_path, ready_timeout_s=config.engine.start_timeout_s) as process:
            yield _describe(process.url, "own", process=process)
        return
    with acquire_lease(url, owner, take_over=config.engine.take_over) as lease:
        yield _describe(url, "given" if config.engine.url else "nanorl serve", lease=lease)


def engine_type(config: Config) -> Literal["torch", "sglang"]:
    """Which engine an own one is; `auto` takes SGLang where a GPU and SGLang are there."""
    if config.engine.type != "auto":
        return config.engine.type
    has_sglang = config.model.device == "cuda" and find_sglang(config.engine.sglang_command) is not None
    return "sglang" if has_sglang else "torch"


def engine_command(config: Config, model: ResolvedModel, port: int = 0) -> EngineCommand:
    """How the configured engine is started.

    Raises:
        ConfigError: this machine can't start it.
    """
    dtype, device = str(config.model.dtype), config.model.device
    try:
        flags = shlex.split(config.engine.flags)
    except ValueError as error:
        raise ConfigError(
            f"engine.flags: expected flags as on a command line, got {config.engine.flags!r}: {error}."
        ) from None
    if engine_type(config) == "torch":
        own = ["--dtype", dtype, "--device", device, "--served-name", model.name]
        return embedded_engine(model.path, *own, *flags, port=port)
    if config.engine.colocate:
        flags = ["--enable-memory-saver", *flags]
    flags = ["--served-model-name", model.name, "--random-seed", str(config.run.seed), *flags]
    return sglang_engine(
        model.path, *flags, dtype=dtype, device=device, port=port, command=config.engine.sglang_command
    )


def _describe(
    url: str, whose: str, *, process: EngineProcess | None = None, lease: Lease | None = None
) -> EngineHandle:
    with EngineClient(url, timeout_s=FIRST_CONTACT_S) as client:
        info = client.server_info()
    is_embedded = "parameters" in info
    return EngineHandle(
        url=url,
        description=f"{'torch' if is_embedded else 'sglang'} ({whose}) {url}",
        context_length=int(info.get("context_length") or info.get("max_total_num_tokens") or 4096),
        is_embedded=is_embedded,
        dtype=str(info["dtype"]).removeprefix("torch.") if info.get("dtype") not in (None, "auto") else None,
        process=process,
        lease=lease,
    )
