"""Routes that steer the engine: state, pausing, aborting, flushing, health."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from nanorl import __version__
from nanorl.engine.intake import Refusal, decode
from nanorl.engine.protocol import AbortBody, PauseBody
from nanorl.engine.responses import json_response
from nanorl.engine.torch_engine import TorchEngine

HEALTH_TIMEOUT_S = 20.0
_ELSEWHERE = "weights reach it over shared memory, CUDA IPC or the disk"
_SGLANG_ONLY = {
    "/release_memory_occupation": "it keeps weights and KV cache where they are; stop the process to free them",
    "/resume_memory_occupation": "it never releases memory",
    "/init_weights_update_group": _ELSEWHERE,
    "/destroy_weights_update_group": _ELSEWHERE,
    "/update_weights_from_distributed": _ELSEWHERE,
    "/update_weights_from_ipc": _ELSEWHERE,
    "/v1/completions": "/generate takes text",
    "/v1/responses": "/v1/chat/completions answers messages",
    "/v1/score": "/generate scores with logprob_start_len",
    "/encode": "it serves no embeddings",
    "/classify": "it serves no classifiers",
    "/open_session": "every request brings its whole prompt",
    "/close_session": "every request brings its whole prompt",
    "/load_lora_adapter": "it has no adapters",
    "/unload_lora_adapter": "it has no adapters",
    "/start_profile": "it has no profiler",
    "/stop_profile": "it has no profiler",
    "/parse_function_call": "it parses no tool calls",
    "/separate_reasoning": "it parses no reasoning",
}
"""Routes of SGLang that are answered with 501, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the server says of its model."""

    path: str
    served_name: str


def state_router(engine: TorchEngine, card: ModelCard) -> APIRouter:
    """/model_info, /server_info, /v1/loads, /v1/models, /health."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/model_info")
    async def model_info() -> Response:
        return json_response(_model_info(engine, card))

    @router.get("/server_info")
    async def server_info() -> Response:
        return json_response(_server_info(engine, card))

    @router.get("/v1/loads")
    async def loads() -> Response:
        return json_response({"version": __version__, "loads": [_load(engine)]})

    @router.get("/v1/models")
    async def models() -> Response:
        entry = {"id": card.served_name, "object": "model", "created": created, "owned_by": "nanorl", "root": card.path}
        return json_response({"object": "list", "data": [entry | {"max_model_len": engine.limits.context_length}]})

    @router.get("/health")
    @router.get("/health_generate")
    async def health() -> Response:
        """200 after the engine's thread has run the model on one token, between two steps of what else it does."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(engine.run(engine.core.check_model)), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise Refusal(f"The engine's thread has not answered for {HEALTH_TIMEOUT_S:g} s", 503) from None
        return Response(status_code=200)

    return router


def control_router(engine: TorchEngine) -> APIRouter:
    """/abort_request, /pause_generation, /continue_generation, /flush_cache, and what only SGLang does."""
    router = APIRouter()

    @router.post("/abort_request")
    async def abort_request(http: HttpRequest) -> Response:
        body = decode(await http.body(), AbortBody)
        if body.abort_all or body.rid:
            await asyncio.wrap_future(engine.run(lambda: engine.core.abort(None if body.abort_all else body.rid)))
        return Response(status_code=200)

    @router.post("/pause_generation")
    async def pause_generation(http: HttpRequest) -> Response:
        body = decode(await http.body(), PauseBody)
        await asyncio.wrap_future(engine.run(lambda: engine.core.pause(body.mode)))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @router.post("/continue_generation")
    async def continue_generation() -> Response:
        await asyncio.wrap_future(engine.run(engine.core.resume))
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Nothing is thrown away, since no KV outlives its request; what counts is the answer that none is in use."""
        if await asyncio.wrap_future(engine.run(engine.core.can_flush)):
            return Response("Cache flushed.\n", media_type="text/plain")
        core = engine.core
        reason = f"{len(core.batch)} requests are running and {len(core.waiting)} waiting"
        return Response(f"Flush cache failed: {reason}.\n", status_code=400, media_type="text/plain")

    for path, reason in _SGLANG_ONLY.items():
        router.add_api_route(path, _refusing(path, reason), methods=["GET", "POST"], include_in_schema=False)
    return router


def _refusing(path: str, reason: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise Refusal(f"The embedded engine has no {path}: {reason}. SGLang has it.", 501)

    return refuse


def _model_info(engine: TorchEngine, card: ModelCard) -> dict[str, Any]:
    config = engine.adapter.config
    return {
        "model_path": card.path,
        "served_model_name": card.served_name,
        "tokenizer_path": card.path,
        "is_generation": True,
        "weight_version": engine.core.version,
        "model_type": getattr(config, "model_type", None),
        "architectures": getattr(config, "architectures", None),
    }


def _load(engine: TorchEngine) -> dict[str, Any]:
    core, limits = engine.core, engine.limits
    # What running requests may come to: each has its room from the start.
    used = sum(sequence.max_tokens for sequence in list(core.batch.sequences))
    return {
        "dp_rank": 0,
        "num_running_reqs": len(core.batch),
        "num_waiting_reqs": len(core.waiting),
        "num_used_tokens": used,
        "max_total_num_tokens": limits.max_total_tokens,
        "max_running_requests": limits.max_running_requests,
        "token_usage": used / limits.max_total_tokens,
        "gen_throughput": core.meter.per_s(),
    }


def _server_info(engine: TorchEngine, card: ModelCard) -> dict[str, Any]:
    core, limits = engine.core, engine.limits
    return {
        "model_path": card.path,
        "served_model_name": card.served_name,
        "version": __version__,
        "engine": "nanorl",
        "process_id": os.getpid(),
        "dtype": str(engine.adapter.dtype).removeprefix("torch."),
        "device": str(engine.adapter.device),
        "context_length": limits.context_length,
        "max_running_requests": limits.max_running_requests,
        "max_total_num_tokens": limits.max_total_tokens,
        "num_running_reqs": len(core.batch),
        "num_waiting_reqs": len(core.waiting),
        "paused": core.paused,
        "weight_update_session": engine.weights.session_open,
        **engine.weights.describe(),
    }
