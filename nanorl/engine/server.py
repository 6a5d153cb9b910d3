"""`python -m nanorl.engine.server --model DIR`: the embedded engine as a process that speaks SGLang's HTTP dialect.

Exit codes: 0 after SIGTERM or SIGINT, 2 for something the user can mend (a message, no traceback), 1 when the engine
died.
"""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from nanorl.errors import EngineError, NanoRLError

STOP_TIMEOUT_S = 1
"""How long requests in flight may take to answer (as aborted) at the end."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m nanorl.engine.server", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder or id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on")
    parser.add_argument("--fd", type=int, help="an inherited, bound socket to listen on instead")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--served-name", help="the model's name in answers; default: --model")
    parser.add_argument("--max-running-requests", type=int, default=512, help="rows that decode together")
    parser.add_argument("--max-total-tokens", type=int, help="KV cache positions; default: a fifth of the memory")
    parser.add_argument("--context-length", type=int, help="default: the model's own")
    parser.add_argument("--seed", type=int, default=0, help="of the seeds of requests that bring none")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Loads, serves until a signal, stops."""
    arguments = parse_arguments(argv)
    try:
        listener = _listen(arguments)
        from nanorl.engine.service import build_service  # torch and transformers: seconds, so after what can fail fast

        service = build_service(arguments)
    except NanoRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0
    return _serve(service, listener)


def _listen(arguments: argparse.Namespace) -> socket.socket:
    if arguments.fd is not None:
        return socket.socket(fileno=arguments.fd)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((arguments.host, arguments.port))
    except OSError as error:
        raise EngineError(
            f"Expected port {arguments.port} on {arguments.host} to be free: {error.strerror or error}. "
            "Choose another --port."
        ) from None
    return listener


def _serve(service: Any, listener: socket.socket) -> int:
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            service.engine.stop()  # answers what is in flight, as aborted
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        service.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_TIMEOUT_S
    )
    server = Server(config)

    def stop_serving() -> None:
        server.should_exit = True

    service.engine.on_crash = stop_serving
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # uvicorn takes over while it runs, and raises the signal again at the end
        signal.signal(number, lambda _number, _frame: None)
    service.engine.start()
    server.run(sockets=[listener])
    service.engine.stop()
    service.engine.join(timeout_s=0.3)
    return 1 if service.engine.failure else 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing down an interpreter with torch in it takes a second, and may crash around a forward pass that still runs.
    os._exit(exit_code)
