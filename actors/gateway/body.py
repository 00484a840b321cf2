"""A request's body as a JSON object, within bounds of size, time and memory.

A client that sends its body drop by drop holds neither a slot of the queue nor the gateway's memory for long: bodies
have a time limit, and all that are being read share one budget of bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

from fastapi import Request

from actors.protocol.fields import RequestError

BODIES_AT_ONCE = 16  # of the largest size, that may be in memory together


@dataclass
class BodyReader:
    """max_bytes: of one body; timeout_s: from the first byte to the last. Not thread-safe: one event loop uses it."""

    max_bytes: int
    timeout_s: float
    _held: int = 0

    async def fields(self, http: Request) -> dict[str, Any]:
        """The body as a JSON object. Raises RequestError 413, 415, 408, 503 or 400."""
        content_type = http.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != "application/json":
            raise RequestError("Send the request as Content-Type: application/json.", status=415)
        if http.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise RequestError("Send the body as it is, without a Content-Encoding.", status=415)
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await self._read(http)
        except TimeoutError as error:
            message = f"The body did not arrive within {self.timeout_s:g} s: send it again."
            raise RequestError(message, status=408, code="request_timeout") from error
        return parse_object(body)

    async def _read(self, http: Request) -> bytes:
        body = bytearray()
        try:
            async for chunk in http.stream():
                self._held += len(chunk)
                body += chunk
                if len(body) > self.max_bytes:
                    raise RequestError(f"The body is larger than {self.max_bytes} bytes: send less.", status=413)
                if self._held > BODIES_AT_ONCE * self.max_bytes:
                    message = "The server reads too many large bodies at once: try again in a moment."
                    raise RequestError(message, status=503, retry_after_s=1)
            return bytes(body)
        finally:
            self._held -= len(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """JSON as RFC 8259 has it, an object at the top. Raises RequestError 400."""
    try:
        fields = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_object)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply to be a request.") from error
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A field that is given twice would be ignored once."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RequestError(f"{twice[:200]!r} is given twice: send it once.", param=twice[:200])
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
