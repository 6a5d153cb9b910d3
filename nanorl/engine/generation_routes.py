"""Routes that generate: /generate and /v1/chat/completions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from nanorl.engine.answers import answers_of, partial_answer
from nanorl.engine.intake import Intake, Refusal, decode
from nanorl.engine.protocol import FinishInfo, GenerateRequest
from nanorl.engine.responses import json_response, sse
from nanorl.engine.sequence import EngineSequence, Request
from nanorl.engine.torch_engine import TorchEngine


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence has got this far."""

    sequence: EngineSequence
    count: int
    finish: FinishInfo | None


class Generator:
    """Bridges HTTP's event loop and the engine's thread."""

    def __init__(self, engine: TorchEngine, intake: Intake) -> None:
        self._engine = engine
        self._intake = intake
        self.tokenizer = intake.tokenizer

    async def complete(self, body: GenerateRequest, http: HttpRequest) -> tuple[list[EngineSequence], bool]:
        """Generates to the end; a client that goes away ends its request.

        Returns:
            (finished sequences, whether the answer is a list).

        Raises:
            Refusal: the request makes no sense, or the engine died (500).
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[str | None] = loop.create_future()

        def done(request: Request, error: str | None) -> None:
            self._engine.close_request(request)
            _call_soon(loop, _settle, finished, error)

        request = Request(on_done=done)
        is_list = self._intake.sequences_of(body, request)
        gone = asyncio.ensure_future(_disconnected(http))
        self._engine.submit(request)
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not finished.done():
                self._engine.forget(request)
        if not finished.done():
            raise Refusal("The client is gone", 499)
        _raise_failure(finished.result())
        return request.sequences, is_list

    async def stream(self, body: GenerateRequest, http: HttpRequest) -> AsyncIterator[Progress]:
        """Yields after every token. Call `check` first: errors can't be reported once the answer has begun."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Progress | str | None] = asyncio.Queue()

        def progress(sequence: EngineSequence) -> None:
            event = Progress(sequence, len(sequence.output_ids), sequence.finish)
            _call_soon(loop, events.put_nowait, event)

        def done(request: Request, error: str | None) -> None:
            self._engine.close_request(request)
            _call_soon(loop, events.put_nowait, error)

        request = Request(on_done=done, on_progress=progress)
        self._intake.sequences_of(body, request)
        gone = asyncio.ensure_future(_disconnected(http))
        gone.add_done_callback(lambda task: None if task.cancelled() else events.put_nowait("The client is gone"))
        self._engine.submit(request)
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, str):
                    raise Refusal(event, 500)
                yield event
        finally:
            gone.cancel()
            self._engine.forget(request)

    def check(self, body: GenerateRequest) -> None:
        """Raises: Refusal, where `stream` would."""
        self._intake.sequences_of(body, Request(on_done=lambda _request, _error: None))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """From the engine's thread; a server that has stopped in the meantime has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _settle(future: "asyncio.Future[str | None]", error: str | None) -> None:
    if not future.done():
        future.set_result(error)


def _raise_failure(error: str | None) -> None:
    if error is not None:
        raise Refusal(error, 500)


def generation_router(generator: Generator) -> APIRouter:
    """/generate."""
    router = APIRouter()

    @router.post("/generate")
    async def generate(http: HttpRequest) -> Response:
        body = decode(await http.body(), GenerateRequest)
        if body.stream:
            generator.check(body)
            return StreamingResponse(_events(generator, body, http), media_type="text/event-stream")
        sequences, is_list = await generator.complete(body, http)
        answers = answers_of(sequences, generator.tokenizer, with_logprobs=body.return_logprob)
        return json_response(answers if is_list else answers[0])

    return router


async def _events(generator: Generator, body: GenerateRequest, http: HttpRequest) -> AsyncIterator[bytes]:
    places: dict[int, int] = {}
    try:
        async for event in generator.stream(body, http):
            if not places:
                places = {id(s): i for i, s in enumerate(event.sequence.request.sequences)}
            answer = partial_answer(
                event.sequence, event.count, event.finish, generator.tokenizer, with_logprobs=body.return_logprob
            )
            index = {"index": places[id(event.sequence)]} if len(places) > 1 else {}
            yield sse(msgspec.to_builtins(answer) | index)
    except Refusal as refusal:
        yield sse({"error": {"message": str(refusal)}})
    yield sse(b"[DONE]")
