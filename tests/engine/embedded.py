"""The embedded engine for tests: the real service under uvicorn on a free port, in a thread of the test process."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import uvicorn

from nanorl.engine.server import parse_arguments
from nanorl.engine.service import Service, build_service


class Served:
    """A running engine, spoken to over HTTP."""

    def __init__(self, url: str, service: Service) -> None:
        self.url = url
        self.engine = service.engine
        self._pool = ThreadPoolExecutor(16)

    def call(self, path: str, body: Any = None, method: str = "POST") -> requests.Response:
        return requests.request(method, self.url + path, json=body, timeout=60)

    def ok(self, path: str, body: Any = None, method: str = "POST") -> Any:
        response = self.call(path, body, method)
        assert response.status_code == 200, response.text
        return response.json() if response.headers.get("content-type") == "application/json" else response.text

    def generate(self, input_ids: Any, *, logprobs: bool = True, rid: Any = None, **sampling: Any) -> Any:
        return self.ok("/generate", generate_body(input_ids, logprobs=logprobs, rid=rid, **sampling))

    def generate_later(self, input_ids: Any, **options: Any) -> "Future[Any]":
        return self._pool.submit(self.generate, input_ids, **options)

    def wait_tokens(self, num_tokens: int = 3) -> None:
        """Until the first running row has sampled at least so many tokens."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            batch = self.engine.core.batch
            if len(batch) and int(batch._counts[0]) >= num_tokens:
                return
            time.sleep(0.002)
        raise AssertionError("nothing runs")

    def wait_queued(self, num_waiting: int) -> None:
        """Until so many sequences wait."""
        end = time.monotonic() + 20
        while len(self.engine.core.waiting) != num_waiting:
            assert time.monotonic() < end, f"{len(self.engine.core.waiting)} wait"
            time.sleep(0.002)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def generate_body(input_ids: Any, *, logprobs: bool = True, rid: Any = None, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": logprobs, "rid": rid}


@contextlib.contextmanager
def serve(model: Path, *options: str) -> Iterator[Served]:
    """Serves until the block ends."""
    service = build_service(parse_arguments(["--model", str(model), *options]))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(service.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    service.engine.start()
    thread.start()
    served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", service)
    try:
        while not server.started:
            time.sleep(0.005)
        yield served
    finally:
        service.engine.stop()
        server.should_exit = True
        thread.join(10)
        service.engine.join(10)
        served.close()
        listener.close()


def sampled(answer: Any) -> tuple[list[int], list[float]]:
    """(ids, logprobs) of one answer; they must agree with output_ids."""
    entries = answer["meta_info"]["output_token_logprobs"]
    ids = [entry[1] for entry in entries]
    assert ids == answer["output_ids"]
    return ids, [entry[0] for entry in entries]
