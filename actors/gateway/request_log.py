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
    call, result, timeline = record.call, record.result, record.timeline
    return {
        "id": record.id,
        "client_request_id": record.client_id,
        "endpoint": record.kind,
        "key": record.key,
        "model": call.model if call else None,
        "user": call.user if call else None,
        "stream": call.stream if call else None,
        "choices": len(call.requests) if call else None,
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error,
        "error_message": record.message,
        "seconds": _rounded(record.seconds),
        "queue_s": _rounded(timeline.queue_s if timeline else None),
        "prefill_s": _rounded(timeline.prefill_s if timeline else None),
        "ttft_s": _rounded(record.first_s),
        "prompt_tokens": len(call.request.prompt_ids) if call else None,
        "cached_tokens": result.cached_tokens if result else None,
        "completion_tokens": result.completion_tokens if result else None,
        "mode": result.mode if result else None,
        "forwards": dict(result.forwards) if result else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
