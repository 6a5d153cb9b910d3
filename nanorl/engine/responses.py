"""Answers of the embedded engine's HTTP server."""

from typing import Any

import msgspec
from fastapi import Response


def json_response(body: Any, status: int = 200) -> Response:
    """Anything that msgspec can encode."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def sse(body: Any) -> bytes:
    """One server-sent event; bytes go as they are."""
    return b"data: " + (body if isinstance(body, bytes) else msgspec.json.encode(body)) + b"\n\n"
