"""Puts the embedded engine together: model, limits, thread, routes."""

import argparse
import os

import torch
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from nanorl.engine.adapter import ModelAdapter, find_stop_ids, load_model
from nanorl.engine.chat_routes import chat_router
from nanorl.engine.control_routes import ModelCard, control_router, state_router
from nanorl.engine.core import EngineLimits
from nanorl.engine.generation_routes import Generator, generation_router
from nanorl.engine.intake import Intake, Refusal
from nanorl.engine.responses import json_response
from nanorl.engine.torch_engine import TorchEngine, pick_device
from nanorl.engine.weight_routes import check_router, weight_router
from nanorl.errors import EngineError
from nanorl.tokens.chat import load_tokenizer

_MEMORY_SHARE = 0.2
"""Of the machine's memory, for the KV cache: the trainer lives there too. Not of what is free at the moment: how many
rows fit decides who runs beside whom, and must not change from run to run.
"""


class Service:
    """The engine and its HTTP application."""

    def __init__(self, engine: TorchEngine, app: FastAPI) -> None:
        self.engine = engine
        self.app = app


def build_service(arguments: argparse.Namespace) -> Service:
    """Loads the model and builds everything around it; nothing runs yet.

    Raises:
        NanoRLError: no GPU, no model, no tokenizer, or limits that leave no room.
    """
    device = pick_device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError("--device cuda: torch finds no GPU on this machine. Use --device cpu.")
    default_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else default_dtype
    tokenizer = load_tokenizer(arguments.model)
    adapter = load_model(arguments.model, device, dtype)
    limits = _limits(arguments, adapter)
    engine = TorchEngine(adapter, tokenizer, limits, seed=arguments.seed)
    intake = Intake(
        limits=limits,
        vocab_size=adapter.vocab_size,
        stop_ids=find_stop_ids(arguments.model, adapter.config, tokenizer),
        tokenizer=tokenizer,
        draw_seed=engine.draw_seed,
    )
    card = ModelCard(path=arguments.model, served_name=arguments.served_name or arguments.model)
    return Service(engine, build_app(engine, intake, card))


def build_app(engine: TorchEngine, intake: Intake, card: ModelCard) -> FastAPI:
    """All routes."""
    app = FastAPI(title="nanorl embedded engine", docs_url=None, redoc_url=None)
    generator = Generator(engine, intake)
    app.include_router(generation_router(generator))
    app.include_router(chat_router(generator, card.served_name))
    for router in (state_router(engine, card), control_router(engine), weight_router(engine), check_router(engine)):
        app.include_router(router)

    @app.exception_handler(Refusal)
    async def refuse(_: HttpRequest, refusal: Refusal) -> Response:
        return json_response({"error": {"message": str(refusal)}}, refusal.status)

    @app.exception_handler(EngineError)
    async def fail(_: HttpRequest, error: EngineError) -> Response:
        return json_response({"error": {"message": str(error)}}, 500)

    return app


def _limits(arguments: argparse.Namespace, adapter: ModelAdapter) -> EngineLimits:
    context = arguments.context_length or getattr(adapter.config, "max_position_embeddings", None) or 4096
    max_rows = arguments.max_running_requests
    bytes_per_token = sum(s.key_width + s.value_width for s in adapter.layer_shapes) * adapter.dtype.itemsize
    fitting = int(_total_bytes(adapter.device) * _MEMORY_SHARE) // bytes_per_token
    max_tokens = arguments.max_total_tokens or min(max_rows * context, fitting)
    if min(context, max_rows, max_tokens // 16) < 1:
        raise EngineError(
            f"No room for a single request: context {context}, {max_rows} rows, {max_tokens} KV positions"
        )
    return EngineLimits(context_length=context, max_total_tokens=max_tokens, max_running_requests=max_rows)


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
