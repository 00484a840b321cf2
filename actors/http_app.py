"""The gateway's HTTP side: routes, streaming, errors and admission, as one FastAPI application over any `Backend`.

It knows nothing of Ray: server.py gives it a backend of engine replicas, a test may give it a scripted one. A request
passes access, shape and size, validation (`parse_call`), admission; then its events come from the backend. The first
event is awaited before a status is sent, so what the engine refuses is still an honest 400 or 500.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from actors.access import Access
from actors.card import ModelCard
from actors.events import Canvas, Delta, Event, Failed, Finished
from actors.fields import RequestError
from actors.logprobs import Logprobs, LogprobWriter, Tokens
from actors.protocol import Call, Kind, parse_call
from actors.request_types import ChatFields, CompletionFields
from actors.responses import DONE, Reply, canvas, error_body, sse
from model.config import DecodeConfig
from model.decoding import GenerationRequest, GenerationResult
from model.errors import JobError, UserError

READY_TIMEOUT_S = 5.0
Shape = Callable[[Tokens, Logprobs | None], Awaitable[dict[str, Any] | None]]
log = logging.getLogger("ray.serve.blockcast")


@dataclass(frozen=True)
class Served:
    """What the gateway must know of its engine. created: seconds since 1970."""

    card: ModelCard
    decode: DecodeConfig
    created: int


class Backend(Protocol):
    """Where requests run. `generate` yields events up to one Finished or Failed; raises UserError or JobError."""

    async def served(self) -> Served: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]: ...

    async def abort(self, request_id: str) -> None: ...

    async def ready(self) -> bool: ...


@dataclass
class Admission:
    """At most `limit` requests at a time in this gateway; the next one is told to come back."""

    limit: int
    inside: int = 0

    def enter(self) -> None:
        if self.inside >= self.limit:
            raise RequestError("The server is full: try again in a moment.", status=429, code="rate_limit_exceeded")
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1


@dataclass
class Gateway:
    """One gateway: a backend, who may ask it, and how much at a time. max_body_bytes bounds a request's body."""

    backend: Backend
    access: Access
    admission: Admission
    max_body_bytes: int = 16 * 2**20
    # Tokenizers are not made for several threads at once, and a long prompt must not stop the event loop.
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize"))
    _aborting: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, http: Request, kind: Kind) -> Response:
        """One request from its bytes to its response."""
        self.check_access(http)
        fields = await _read_fields(http, self.max_body_bytes)
        served = await self.backend.served()
        _check_model(fields, served.card.name)
        call = await self._parse(fields, kind, served)
        reply = Reply(
            id=call.request.id,
            created=int(time.time()),
            model=served.card.name,
            revision=served.card.revision,
            kind=kind,
            include_usage=call.include_usage,
        )
        shape = self._logprobs_of(call, kind, served)
        self.admission.enter()
        run = Run(self, call)
        try:
            events = await run.begin()
            if call.stream:
                return EventStream(_stream(reply, events, shape), run.close)
            result = await _result(events)
            return JSONResponse(reply.whole(result, await shape(result.token_ids, result.logprobs)))
        finally:
            if not (call.stream and run.begun):
                run.close()

    def check_access(self, http: Request) -> None:
        self.access.check(
            authorization=http.headers.get("authorization"),
            client=http.client.host if http.client else None,
            host=http.headers.get("host"),
            forwarded="x-forwarded-for" in http.headers or "forwarded" in http.headers,
        )

    async def _parse(self, fields: Mapping[str, Any], kind: Kind, served: Served) -> Call:
        request_id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        parse = partial(
            parse_call,
            fields,
            kind=kind,
            card=served.card,
            decode=served.decode,
            request_id=request_id,
            default_seed=uuid.uuid4().int >> 65,
        )
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, parse)

    def _logprobs_of(self, call: Call, kind: Kind, served: Served) -> Shape:
        """What puts the log-probabilities of this call's tokens into OpenAI's shape, where it asks for them."""
        writer = LogprobWriter(served.card.tokenizer, kind)

        async def shape(token_ids: Tokens, logprobs: Logprobs | None) -> dict[str, Any] | None:
            if logprobs is None:
                return None
            write = partial(writer.write, token_ids, logprobs)
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, write)

        return shape

    def abort(self, request_id: str) -> None:
        """Free the row of a client that left, without waiting for it."""
        task = asyncio.get_running_loop().create_task(self.backend.abort(request_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


@dataclass
class Run:
    """One admitted request: its events, and its end, whichever way it comes (finished, failed, or the client left)."""

    gateway: Gateway
    call: Call
    begun: bool = False
    ended: bool = False
    closed: bool = False
    started: float = field(default_factory=time.monotonic)

    async def begin(self) -> AsyncIterator[Event]:
        """Wait for the first event; raises what the backend refuses before anything is sent."""
        events = self._events()
        first = await anext(events)
        _raise_failure(first)
        self.begun = True
        return _chained(first, events)

    async def _events(self) -> AsyncIterator[Event]:
        try:
            async for event in self.gateway.backend.generate(self.call.request):
                self.ended = isinstance(event, Finished | Failed)
                yield event
        except (UserError, JobError):
            self.ended = True
            raise

    def close(self) -> None:
        """Leave the queue; a row that is still running is aborted."""
        if self.closed:
            return
        self.closed = True
        self.gateway.admission.leave()
        if not self.ended:
            self.gateway.abort(self.call.request.id)
        how = "ended" if self.ended else "aborted"
        seconds = time.monotonic() - self.started
        request, user = self.call.request, json.dumps(self.call.user)
        log.info(f"{request.id} {how} after {seconds:.3f} s, prompt {len(request.prompt_ids)} tokens, user {user}")


class EventStream(StreamingResponse):
    """Server-sent events that run `close` however the response ends: sent, failed, or cancelled by a disconnect."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _chained(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event


async def _stream(reply: Reply, events: AsyncIterator[Event], shape: Shape) -> AsyncIterator[str]:
    """The events as SSE text. What fails after the status was sent becomes an error event, and no [DONE] follows it."""
    try:
        for chunk in reply.opening():
            yield sse(chunk)
        async for event in events:
            _raise_failure(event)
            if isinstance(event, Delta) and (event.text or event.logprobs):
                yield sse(reply.delta(event.text, await shape(event.token_ids, event.logprobs)))
            elif isinstance(event, Canvas):
                yield sse(canvas(event), event="canvas")
            elif isinstance(event, Finished):
                yield "".join(sse(chunk) for chunk in reply.closing(event.result)) + DONE
    except (UserError, JobError) as error:
        yield sse(error_body(str(error), 500))


async def _result(events: AsyncIterator[Event]) -> GenerationResult:
    async for event in events:
        _raise_failure(event)
        if isinstance(event, Finished):
            return event.result
    raise JobError("The engine ended this request without an answer: send it again.")


def _raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise JobError(event.message)


async def _read_fields(http: Request, limit: int) -> dict[str, Any]:
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


def _check_model(fields: Mapping[str, Any], served: str) -> None:
    asked = fields.get("model")
    if asked is None:
        raise RequestError(f"model is required: this server has {served!r}.", param="model")
    if isinstance(asked, str) and asked != served:
        message = f"There is no model {asked[:200]!r}: this server has {served!r}."
        raise RequestError(message, param="model", status=404, code="model_not_found")


# ------------------------------------------------------------------------------------------------- routes
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
        _check_model({"model": name}, served.card.name)
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
