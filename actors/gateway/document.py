"""The OpenAPI document: every route with its request, its answers and its errors, as they really are.

Request types come from `actors.protocol.request_types` and the field tables, answers from
`actors.protocol.response_types`; the tests hold the document and the server together, with a tool that reads the one
and asks the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from actors.gateway.serve_headers import TIMEOUT_HEADER
from actors.protocol.fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldRule
from actors.protocol.request_types import ChatFields, CompletionFields, TokenizeFields
from actors.protocol.response_types import (
    CanvasEvent,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    ErrorAnswer,
    Health,
    ModelEntry,
    ModelList,
    Readiness,
    Tokens,
)
from model.config import FUSED, MODES
from model.decoding.policies import POLICIES

REFERENCE = "#/components/schemas/{model}"
REQUESTS: dict[str, Mapping[str, FieldRule]] = {"ChatFields": CHAT_FIELDS, "CompletionFields": COMPLETION_FIELDS}
TYPES: tuple[type[BaseModel], ...] = (
    ChatFields,
    CompletionFields,
    TokenizeFields,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    CanvasEvent,
    ErrorAnswer,
    Health,
    ModelEntry,
    ModelList,
    Readiness,
    Tokens,
)
ERRORS = {
    400: "The body, a field or its value; `param` names the field",
    401: "No configured API key was shown",
    403: "Without API keys only this machine is served",
    404: "Another model than the served one",
    408: "The body did not arrive in time",
    413: "The body is larger than `max_body_bytes`",
    415: "The body is not plain `application/json`",
    429: "The queue is full; `Retry-After` says when to come back",
    500: "The engine failed on the request",
    503: "No engine can take the request now; `Retry-After` says when to come back",
    504: "The answer took too long",
}
OF_A_BODY = (400, 404, 408, 413, 415, 500, 503)
OF_AN_ENGINE = (429, 504)


def openapi_document(*, keys: bool, deadline_s: float) -> dict[str, Any]:
    """The document of one server. keys: API keys are configured, so that every request but the probes shows one.

    deadline_s: the longest that an answer may take.
    """
    access = (401,) if keys else (403,)
    seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": deadline_s}
    bounds = {"X-Deadline-S": seconds, TIMEOUT_HEADER: {"type": "number", "exclusiveMinimum": 0}}
    deadlines = [{"name": n, "in": "header", "required": False, "schema": bound} for n, bound in bounds.items()]
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths = {
        "/v1/chat/completions": {"post": _generation("Answer a chat", "ChatFields", "ChatAnswer", access, deadlines)},
        "/v1/completions": {
            "post": _generation("Go on from a prompt", "CompletionFields", "CompletionAnswer", access, deadlines)
        },
        "/tokenize": {"post": _asking("What a request is read as", "TokenizeFields", "Tokens", access)},
        "/v1/models": {"get": _operation("The served model", "ModelList", (*access, 500, 503))},
        "/v1/models/{model}": {
            "get": {**_operation("One model", "ModelEntry", (404, *access, 500, 503)), "parameters": [name]}
        },
        "/metrics": {"get": _metrics(access)},
        "/health": {"get": _operation("Whether the gateway lives", "Health", (), open_to_all=True)},
        "/ready": {"get": _operation("Whether an engine generates tokens", "Readiness", (503,), open_to_all=True)},
    }
    components: dict[str, Any] = {"schemas": _schemas()}
    document: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": "Blockcast", "version": "1"}, "paths": paths}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return {**document, "components": components}


def _generation(
    summary: str, request: str, answer: str, access: tuple[int, ...], deadlines: list[dict[str, Any]]
) -> dict[str, Any]:
    operation = _asking(summary, request, answer, (*OF_AN_ENGINE, *access))
    operation["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": _event(answer.replace("Answer", "Chunk"))
    }
    return {**operation, "parameters": deadlines}


def _event(chunk: str) -> dict[str, Any]:
    """One server-sent event of an answer with `stream: true`."""
    data = [{"$ref": REFERENCE.format(model=name)} for name in (chunk, "CanvasEvent", "ErrorAnswer")]
    written = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": data}}
    return {
        "type": "object",
        "description": "One event; the last one's data is [DONE], unless it is an error.",
        "properties": {"event": {"enum": ["message", "canvas"]}, "data": {"anyOf": [{"const": "[DONE]"}, written]}},
        "required": ["data"],
    }


def _asking(summary: str, request: str, answer: str, errors: tuple[int, ...]) -> dict[str, Any]:
    operation = _operation(summary, answer, (*OF_A_BODY, *errors))
    return {**operation, "requestBody": {"required": True, "content": _json(request)}}


def _operation(summary: str, answer: str, errors: tuple[int, ...], *, open_to_all: bool = False) -> dict[str, Any]:
    responses = {"200": {"description": summary, "content": _json(answer)}}
    for status in sorted(errors):
        responses[str(status)] = {"description": ERRORS[status], "content": _json("ErrorAnswer"), **_headers(status)}
    return {"summary": summary, "responses": responses, **({"security": []} if open_to_all else {})}


def _headers(status: int) -> dict[str, Any]:
    if status in (429, 503):
        return {"headers": {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}}
    if status == 401:
        return {"headers": {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}}
    return {}


def _metrics(access: tuple[int, ...]) -> dict[str, Any]:
    operation = _operation("Prometheus' metrics of all replicas", "", (*access, 500, 503))
    kinds = ("text/plain", "application/openmetrics-text")
    operation["responses"]["200"]["content"] = {kind: {"schema": {"type": "string"}} for kind in kinds}
    return operation


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=name)}}}


def _schemas() -> dict[str, Any]:
    """Every type by name; request types with the fields that are refused, and what may be sent for them."""
    modes: Any = [(kind, "validation") for kind in TYPES]
    schemas: dict[str, Any] = models_json_schema(modes, ref_template=REFERENCE)[1]["$defs"]
    for request, rules in REQUESTS.items():
        properties = schemas[request]["properties"]
        for name, rule in rules.items():
            accepted = {} if rule.honoured else {"enum": [None, *rule.neutral]}
            properties[name] = {**properties.get(name, {}), **accepted, "description": f"{rule.note}."}
    for request in (*REQUESTS, "TokenizeFields"):
        schemas[request]["properties"]["model"] = {"type": "string", "description": f"{CHAT_FIELDS['model'].note}."}
        schemas[request]["required"] = ["model", *schemas[request].get("required", ())]
    schemas["TokenizeFields"]["oneOf"] = [_alone("prompt", "messages"), _alone("messages", "prompt")]
    diffusion = schemas["DiffusionOptions"]["properties"]
    for name, values in (("mode", MODES), ("policy", POLICIES), ("fused", FUSED)):
        diffusion[name] = {"enum": [None, *values]}
    diffusion["refresh"]["anyOf"][0]["pattern"] = "^(always|sub_block|every:[1-9][0-9]{0,5})$"
    return schemas


def _alone(name: str, other: str) -> dict[str, Any]:
    """The one field with a value, the other without."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, other: {"type": "null"}}}
