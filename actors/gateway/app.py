"""The gateway's routes, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from actors.gateway.backend import Backend, Served
from actors.gateway.document import openapi_document
from actors.gateway.gateway import Gateway, check_model
from actors.gateway.page import add_page
from actors.gateway.streams import error_sent
from actors.protocol.responses import error_body
from model.errors import JobError, UserError

READY_TIMEOUT_S = 5.0
READ = ["GET", "HEAD"]


def create_app(gateway: Gateway, *, cors_origins: Sequence[str] = ()) -> FastAPI:
    """The application: OpenAI's routes, health and readiness, every error in OpenAI's shape.

    cors_origins: web origins whose pages may call the API from a browser; none by default.
    """
    # The document is our own, and no redirect to a path without its last slash goes where a Host header says.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    document = openapi_document(keys=bool(gateway.access.key_hashes), deadline_s=gateway.deadline_s)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await gateway.answer(request, "chat")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await gateway.answer(request, "completion")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await gateway.tokens(request)

    @app.api_route("/v1/models", methods=READ)
    async def models(request: Request) -> dict[str, Any]:
        gateway.check_access(request)
        served = await gateway.backend.served()
        names = (served.card.name, *gateway.further)
        return {"object": "list", "data": [_model_entry(name, served) for name in names]}

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(request: Request, name: str) -> dict[str, Any]:
        gateway.check_access(request)
        served = await gateway.backend.served()
        check_model({"model": name}, (served.card.name, *gateway.further))
        return _model_entry(name, served)

    @app.api_route("/metrics", methods=READ)
    async def metrics(request: Request) -> Response:
        gateway.check_access(request)
        body, content_type = await gateway.observer.scrape(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    @app.api_route("/health", methods=READ)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=READ)
    async def ready() -> Response:
        return await _ready(gateway.backend)

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> dict[str, Any]:
        return document

    add_page(app, gateway)
    _shape_errors(app)
    return app


def _model_entry(name: str, served: Served) -> dict[str, Any]:
    """OpenAI's four keys; of the default model also how it writes blocks (null: token by token only)."""
    entry = {"id": name, "object": "model", "created": served.created, "owned_by": "blockcast"}
    if name != served.card.name:
        return entry
    adapted = served.card.block_diffusion
    blocks = adapted and {"block_size": adapted.block_size, "sub_block_size": adapted.sub_block_size}
    return {**entry, "max_model_len": served.card.context_length, "block_diffusion": blocks}


async def _ready(backend: Backend) -> Response:
    """200 once a replica has really generated a token and its engine goes on."""
    try:
        is_ready = await asyncio.wait_for(backend.ready(), READY_TIMEOUT_S)
    except (TimeoutError, JobError):
        is_ready = False
    if is_ready:
        return JSONResponse({"status": "ready"})
    return JSONResponse(error_body("No engine is ready yet.", 503), 503, {"Retry-After": "1"})


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
