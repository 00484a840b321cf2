"""The gateway's routes, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from actors.gateway.backend import Backend, Served
from actors.gateway.gateway import Gateway, check_model
from actors.gateway.page import add_page
from actors.gateway.streams import error_sent
from actors.request_types import ChatFields, CompletionFields, TokenizeFields
from actors.responses import error_body
from model.errors import JobError, UserError

READY_TIMEOUT_S = 5.0


def create_app(gateway: Gateway, *, cors_origins: Sequence[str] = ()) -> FastAPI:
    """The application: OpenAI's routes, health and readiness, every error in OpenAI's shape.

    cors_origins: web origins whose pages may call the API from a browser; none by default.
    """
    app = FastAPI(title="Blockcast", docs_url=None, redoc_url=None)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatFields))
    async def chat_completions(request: Request) -> Response:
        return await gateway.answer(request, "chat")

    @app.post("/v1/completions", openapi_extra=_body(CompletionFields))
    async def completions(request: Request) -> Response:
        return await gateway.answer(request, "completion")

    @app.post("/tokenize", openapi_extra=_body(TokenizeFields))
    async def tokenize(request: Request) -> Response:
        return await gateway.tokens(request)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        gateway.check_access(request)
        return {"object": "list", "data": [_model_entry(await gateway.backend.served())]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        gateway.check_access(request)
        served = await gateway.backend.served()
        check_model({"model": name}, served.card.name)
        return _model_entry(served)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        gateway.check_access(request)
        body, content_type = await gateway.observer.scrape(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        return await _ready(gateway.backend)

    add_page(app, gateway)
    _shape_errors(app)
    return app


def _model_entry(served: Served) -> dict[str, Any]:
    """OpenAI's four keys, and how the model writes blocks (null: token by token only)."""
    adapted = served.card.block_diffusion
    blocks = adapted and {"block_size": adapted.block_size, "sub_block_size": adapted.sub_block_size}
    own = {"max_model_len": served.card.context_length, "block_diffusion": blocks}
    return {"id": served.card.name, "object": "model", "created": served.created, "owned_by": "blockcast", **own}


async def _ready(backend: Backend) -> Response:
    """200 once a replica has really generated a token and its engine goes on."""
    try:
        is_ready = await asyncio.wait_for(backend.ready(), READY_TIMEOUT_S)
    except (TimeoutError, JobError):
        is_ready = False
    if is_ready:
        return JSONResponse({"status": "ready"})
    return JSONResponse(error_body("No engine is ready yet.", 503), 503)


def _body(fields: type[BaseModel]) -> dict[str, Any]:
    schema = fields.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _shape_errors(app: FastAPI) -> None:
    async def told(request: Request, error: Any) -> Response:
        status, body = error_sent(error)
        return JSONResponse(body, status, _headers(status, error))

    async def routing(request: Request, error: Any) -> Response:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)

    async def defect(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body("The server failed; its log says why.", 500), 500)

    app.add_exception_handler(UserError, told)
    app.add_exception_handler(JobError, told)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(Exception, defect)


def _headers(status: int, error: UserError | JobError) -> dict[str, str]:
    if status in (429, 503):
        return {"Retry-After": str(getattr(error, "retry_after_s", None) or 1)}
    return {"WWW-Authenticate": "Bearer"} if status == 401 else {}
