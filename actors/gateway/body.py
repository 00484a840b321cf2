"""A request's body, as a JSON object within bounds."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fastapi import Request

from actors.fields import RequestError


async def read_fields(http: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError 413, 415 or 400."""
    content_type = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError("Send the request as Content-Type: application/json.", status=415)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit:
            raise RequestError(f"The body is larger than {limit} bytes: send a shorter request.", status=413)
    try:
        fields = json.loads(bytes(body), parse_constant=_no_constant)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply to be a request.") from error
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
