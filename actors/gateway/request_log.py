"""The log of requests: one line for each that ended, with figures and ids, never with a prompt, an answer or a key.

As JSON each field is a key of the line beside Serve's own (time, level, replica); as text the line reads
`request id="cmpl-..." status=200 ...`. What a client did wrong is told by kind: the sentence could quote the prompt.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.gateway.record import RequestRecord

log = logging.getLogger("ray.serve.blockcast")


class RequestLog:
    """as_json: whether the handlers write JSON, so that fields are handed over as fields."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def write(self, record: RequestRecord) -> None:
        """The request has ended."""
        fields = line_of(record)
        if self._as_json:
            log.info("request", extra=fields)
        else:
            log.info("request %s", " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items()))


def line_of(record: RequestRecord) -> dict[str, Any]:
    """The fields of a request's line; seconds are since its arrival, null is unknown or does not apply."""
    call, result = record.call, record.result
    return {
        "id": record.id,
        "client_request_id": record.client_id,
        "endpoint": record.kind,
        "key": record.key,
        "model": call.model if call else None,
        "user": call.user if call else None,
        "stream": call.stream if call else None,
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error,
        "error_message": record.message,
        "seconds": round(record.seconds, 6),
        "ttft_s": None if record.first_s is None else round(record.first_s, 6),
        "prompt_tokens": len(call.request.prompt_ids) if call else None,
        "cached_tokens": result.cached_tokens if result else None,
        "completion_tokens": result.completion_tokens if result else None,
        "mode": result.mode if result else None,
        "forwards": dict(result.forwards) if result else None,
    }
