"""Routes of the weight update: session, carriers, versions and checks. All answers carry `success` and `message`."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from nanorl.engine.intake import Refusal, decode
from nanorl.engine.protocol import (
    FLATTENED_BUCKET,
    BeginUpdateBody,
    CheckWeightsBody,
    WeightByNameBody,
    WeightUpdateFromDisk,
    WeightUpdateFromTensor,
    WeightVersionBody,
)
from nanorl.engine.responses import json_response
from nanorl.engine.tensor_payload import deserialize_bucket, deserialize_named_tensors
from nanorl.engine.torch_engine import TorchEngine
from nanorl.engine.weights import overall_checksum, read_folder, split_bucket
from nanorl.errors import EngineError, WeightSyncError


def weight_router(engine: TorchEngine) -> APIRouter:
    """The three calls of the session, the disk carrier, and what names or reads weights."""
    router = APIRouter()

    @router.post("/begin_weight_update")
    async def begin_weight_update(http: HttpRequest) -> Response:
        decode(await http.body(), BeginUpdateBody)
        return await _verdict(engine, lambda: engine.weights.begin() or "Success")

    @router.post("/end_weight_update")
    async def end_weight_update() -> Response:
        return await _verdict(engine, lambda: engine.weights.end() or "Success")

    @router.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(http: HttpRequest) -> Response:
        body = decode(await http.body(), WeightUpdateFromTensor)
        return await _verdict(engine, lambda: _update_from_tensor(engine, body))

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(http: HttpRequest) -> Response:
        body = decode(await http.body(), WeightUpdateFromDisk)
        return await _verdict(engine, lambda: _update_from_disk(engine, body))

    @router.post("/update_weight_version")
    async def update_weight_version(http: HttpRequest) -> Response:
        body = decode(await http.body(), WeightVersionBody)
        await _verdict(engine, lambda: _rename(engine, body))
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})

    return router


def check_router(engine: TorchEngine) -> APIRouter:
    """/get_weights_by_name and /weights_checker."""
    router = APIRouter()

    @router.get("/get_weights_by_name")
    @router.post("/get_weights_by_name")
    async def get_weights_by_name(http: HttpRequest) -> Response:
        body = decode(await http.body(), WeightByNameBody)
        values = await asyncio.wrap_future(engine.run(lambda: engine.weights.first_rows(body.name, body.truncate_size)))
        if values is None:
            raise Refusal(f"Get parameter by name failed: the model has no {body.name!r}")
        return json_response(values)

    @router.get("/weights_checker")
    @router.post("/weights_checker")
    async def weights_checker(http: HttpRequest) -> Response:
        body = decode(await http.body(), CheckWeightsBody)
        if body.action != "checksum":
            return json_response({"success": False, "message": f"Unsupported action={body.action!r}"}, 400)
        each = await asyncio.wrap_future(engine.run(engine.weights.checksums))
        overall = overall_checksum(each)
        ranks = [{"checksums": each, "per_gpu_checksum": overall}]
        return json_response({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": overall})

    return router


async def _verdict(engine: TorchEngine, command: Callable[[], str]) -> Response:
    """Runs a step of the session; its message with success, or the refusal with 400."""
    try:
        message = await asyncio.wrap_future(engine.run(command))
    except WeightSyncError as error:
        return json_response({"success": False, "message": str(error)}, 400)
    except EngineError as error:
        return json_response({"success": False, "message": str(error)}, 500)
    return json_response({"success": True, "message": message})


def _update_from_tensor(engine: TorchEngine, body: WeightUpdateFromTensor) -> str:
    engine.weights.require_session("update_weights_from_tensor")
    if len(body.serialized_named_tensors) != 1:
        raise WeightSyncError(
            f"Expected one payload, for the one rank there is, got {len(body.serialized_named_tensors)}"
        )
    payload = body.serialized_named_tensors[0]
    if body.load_format == FLATTENED_BUCKET:
        named_tensors = split_bucket(*deserialize_bucket(payload))
    elif body.load_format is None:
        named_tensors = deserialize_named_tensors(payload)
    else:
        raise WeightSyncError(
            f"The embedded engine has no load_format {body.load_format!r}, only {FLATTENED_BUCKET} and none"
        )
    return _replace(engine, named_tensors, body)


def _update_from_disk(engine: TorchEngine, body: WeightUpdateFromDisk) -> str:
    """Needs no session, as in SGLang: a folder is always complete."""
    return _replace(engine, read_folder(body.model_path), body)


def _replace(
    engine: TorchEngine, named_tensors: list[tuple[str, Any]], body: WeightUpdateFromTensor | WeightUpdateFromDisk
) -> str:
    """Checks everything, then lets go of old KV, copies, and counts the version; returns what to say.

    Raises:
        WeightSyncError: nothing was changed, or (in_place) all was changed and old KV is still in use.
    """
    pairs, unknown = engine.weights.plan(named_tensors)
    if body.abort_all_requests:
        engine.core.abort(None)
    engine.core.prepare_weight_change()
    engine.weights.copy(pairs)
    if body.weight_version is not None:
        engine.core.set_version(body.weight_version)
    if body.flush_cache and engine.core.batch.sequences:
        raise WeightSyncError(
            "Weights were updated, but the cache was not flushed because requests are still running on the old one. "
            "Retract or finish them, then call /flush_cache, or say flush_cache false."
        )
    return f"Success, {len(unknown)} unknown names ignored: {', '.join(unknown[:5])}" if unknown else "Success"


def _rename(engine: TorchEngine, body: WeightVersionBody) -> str:
    if body.abort_all_requests:
        engine.core.abort(None)
    engine.core.set_version(body.new_version)
    return ""
