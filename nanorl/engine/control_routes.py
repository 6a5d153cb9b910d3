"""Routes that steer the engine: state, pausing, the weight session, checks."""

from dataclasses import dataclass

from fastapi import APIRouter, Response

from nanorl.engine.generation_routes import json_response
from nanorl.engine.torch_engine import TorchEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the server says of its model."""

    path: str
    served_name: str


def control_router(engine: TorchEngine, card: ModelCard) -> APIRouter:
    """All of them."""
    router = APIRouter()

    @router.get("/model_info")
    async def model_info() -> Response:
        config = engine.adapter.config
        return json_response(
            {
                "model_path": card.path,
                "served_model_name": card.served_name,
                "tokenizer_path": card.path,
                "is_generation": True,
                "weight_version": engine.core.version,
                "model_type": getattr(config, "model_type", None),
                "architectures": getattr(config, "architectures", None),
            }
        )

    return router
