"""`nanorl serve`: one engine until Ctrl-C, found by the other commands of this machine."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from nanorl.config import Config
from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineProcess
from nanorl.engine.registry import register_server
from nanorl.loops.engine import engine_command, engine_type
from nanorl.loops.resolve import resolve
from nanorl.tracking.view import View

REFRESH_S = 1.0


def serve(config: Config, port: int, view: View) -> None:
    """Starts the engine, shows its load, and stops it at the end, whatever the end is.

    Raises:
        NanoRLError: the model can't be had, the port is taken, or the engine died.
    """
    config, model = resolve(config, view.progress)
    view.progress("starting the engine", 0, 0)
    kind, command = engine_type(config), engine_command(config, model, port)
    with (
        TemporaryDirectory(prefix="nanorl-serve-") as folder,
        EngineProcess(
            command, log_path=Path(folder) / "engine.log", ready_timeout_s=config.engine.start_timeout_s
        ) as process,
    ):
        view.header(
            {
                "model": model.name,
                "engine": f"{kind} {process.url}",
                "device": config.model.device,
                "dtype": str(config.model.dtype),
            }
        )
        view.note("Ready. Other nanorl commands with this model find it; Ctrl-C stops it.")
        with register_server(process.url, model.path, kind), EngineClient(process.url) as client:
            while True:
                process.check_alive()
                view.status(_status(client))
                time.sleep(REFRESH_S)


def _status(client: EngineClient) -> dict[str, str]:
    """What a person watches of a server, as far as the engine tells."""
    load = client.load()
    tokens_per_s = client.tokens_per_s(load)
    facts = {
        "running": load.num_running_reqs,
        "queued": load.num_waiting_reqs,
        "tokens/s": None if tokens_per_s is None else f"{tokens_per_s:,.0f}",
        "KV": None if load.token_usage is None else f"{load.token_usage:.0%}",
        "weight version": client.model_info().weight_version,
    }
    return {name: str(fact) for name, fact in facts.items() if fact is not None}
