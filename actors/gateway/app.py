"""The gateway's routes, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from actors.fields import RequestError
from actors.gateway.backend import Backend, Served
from actors.gateway.gateway import Gateway, check_model
from actors.request_types import ChatFields, CompletionFields
from actors.responses import error_body
from model.errors import JobError, UserError

READY_TIMEOUT_S = 5.0


def create_app(gateway: Gateway) -> FastAPI:
    """The application: OpenAI's routes, health and readiness, every error in OpenAI's shape."""
    app = FastAPI(title="Blockcast", docs_url=None, redoc_url=None)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatFields))
    async def chat_completions(request: Request) -> Response:
        return await gateway.answer(request, "chat")

    @app.post("/v1/completions", openapi_extra=_body(CompletionFields))
    async def completions(request: Request) -> Response:
        return await gateway.answer(request, "completion")

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

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        return await _ready(gateway.backend)

    _shape_errors(app)
    return app


def _model_entry(served: Served) -> dict[str, Any]:
    return {"id": served.card.name, "object": "model", "created": served.created, "owned_by": "blockcast"}


async def _ready(backend: Backend) -> Response:
    """200 once a replica has really generated a token and its engine goes on."""
    try:
        is_ready = await asyncio.wait_for(backend.ready(), READY_TIMEOUT_S)
    except (TimeoutError, JobError):
        is_ready = False
    if is_ready:
        return JSONResponse({"status": "ready"})
    return JSONResponse(error_body("No engine is ready yet.", 503), 503)


def _body(fields: type[ChatFields] | type[CompletionFields]) -> dict[str, Any]:
    schema = fields.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _shape_errors(app: FastAPI) -> None:
    Handler = Callable[[Request, Exception], Awaitable[Response]]

    def shaped(status: Callable[[Any], int], message: Callable[[Any], str] = str) -> Handler:
        async def handle(request: Request, error: Any) -> Response:
            code = status(error)
            fields = {"param": error.param, "code": error.code} if isinstance(error, RequestError) else {}
            headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(code)
            return JSONResponse(error_body(message(error), code, **fields), code, headers)

        return handle

    app.add_exception_handler(RequestError, shaped(lambda e: e.status))
    app.add_exception_handler(UserError, shaped(lambda e: 400))
    app.add_exception_handler(JobError, shaped(lambda e: 500))
    app.add_exception_handler(HTTPException, shaped(lambda e: e.status_code, lambda e: str(e.detail)))
    app.add_exception_handler(Exception, shaped(lambda e: 500, lambda e: "The server failed; its log says why."))
