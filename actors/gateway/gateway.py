"""The path of one request: access, shape and size, validation (`parse_call`), admission; then events from the backend.

Knows nothing of Ray: server.py gives it a backend of engine replicas, a test may give it a scripted one. The first
event is awaited before a status is sent, so what the engine refuses is still an honest 400 or 500.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from actors.engine.events import Canvas, Event, Failed, Finished
from actors.gateway.access import Access
from actors.gateway.admission import Admission
from actors.gateway.backend import Backend, Served
from actors.gateway.body import BodyReader
from actors.gateway.record import Observer, RequestRecord
from actors.gateway.serve_headers import check_serve_headers
from actors.gateway.streams import Choice, Draw, EventStream, Shape, raise_failure, results_of, stream_events
from actors.protocol.calls import Call, Kind, parse_call, parse_tokenize
from actors.protocol.fields import RequestError
from actors.protocol.logprobs import Logprobs, LogprobWriter, Tokens, token_bytes, token_text
from actors.protocol.responses import Reply, canvas
from model.errors import UserError

DEADLINE_HEADER = "X-Deadline-S"
T = TypeVar("T")


@dataclass
class Gateway:
    """One gateway: a backend, who may ask it, how much at a time, and how long an answer may take.

    deadline_s: from the arrival of the body to the end of the answer; a request may ask for less (`X-Deadline-S`, or
    Serve's own `x-request-timeout-seconds`, which counts from the arrival of its head).
    further: names of the models that the backend has beside its default one.
    """

    backend: Backend
    access: Access
    admission: Admission
    bodies: BodyReader
    observer: Observer
    deadline_s: float = 600.0
    further: tuple[str, ...] = ()
    # Tokenizers are not made for several threads at once, and a long prompt must not stop the event loop.
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize"))
    _aborting: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, http: Request, kind: Kind) -> Response:
        """One request from its bytes to its response, on the record."""
        record = self.observer.begin(http.headers, kind)
        return await self.observer.watch(record, self._answer(http, kind, record))

    async def _answer(self, http: Request, kind: Kind, record: RequestRecord) -> Response:
        arrived = asyncio.get_running_loop().time()
        key = self.check_access(http)
        record.known_as(key)
        serves = check_serve_headers(http.headers)
        fields = await self.bodies.fields(http)
        seconds = self._seconds(http.headers.get(DEADLINE_HEADER))
        deadline = asyncio.get_running_loop().time() + seconds
        if serves is not None and arrived + serves < deadline:
            seconds, deadline = serves, arrived + serves
        served, model = await self.choose(fields)
        self.admission.enter(key)
        run = Run(self, key, seconds, deadline, model)
        begun = False
        try:
            call = await self._parse(fields, kind, served, record.id)
            record.called(call)
            run.hold(len(call.requests))
            reply = Reply(
                id=call.request.id,
                created=int(time.time()),
                model=served.card.name,
                revision=served.card.revision,
                kind=kind,
                include_usage=call.include_usage,
            )
            shapes = (self._logprobs_of(kind, served) for _ in call.requests)
            choices = {r.id: Choice(i, shape) for i, (r, shape) in enumerate(zip(call.requests, shapes, strict=True))}
            events = record.overhear(await run.begin(call, record.traceparent))
            if call.stream:
                begun = True
                return EventStream(stream_events(reply, events, choices, self._drawing(served, reply.id)), run.close)
            results = await results_of(events, choices)
            logprobs = [await choices[result.id].shape(result.token_ids, result.logprobs) for result in results]
            return JSONResponse(reply.whole(results, logprobs))
        finally:
            if not begun:
                run.close()

    async def tokens(self, http: Request) -> Response:
        """The tokens that a prompt or a chat would be read as."""
        key = self.check_access(http)
        check_serve_headers(http.headers)
        fields = await self.bodies.fields(http)
        served, _ = await self.choose(fields)
        self.admission.enter(key)
        try:
            ids = await self._off_loop(partial(parse_tokenize, fields, served.card))
        finally:
            self.admission.leave(key)
        return JSONResponse({"tokens": list(ids), "count": len(ids), "max_model_len": served.card.context_length})

    async def choose(self, fields: Mapping[str, Any]) -> tuple[Served, str | None]:
        """The model that a request asks for, as the backend knows it: its name, None for the default one."""
        default = await self.backend.served()
        name = check_model(fields, (default.card.name, *self.further))
        return (await self.backend.served(name), name) if name in self.further else (default, None)

    def check_access(self, http: Request) -> str | None:
        """Who asks (a name of the API key, None without keys). Raises RequestError 401 or 403."""
        return self.access.check(
            authorization=http.headers.get("authorization"),
            client=http.client.host if http.client else None,
            host=http.headers.get("host"),
            forwarded="x-forwarded-for" in http.headers or "forwarded" in http.headers,
        )

    def _seconds(self, asked: str | None) -> float:
        """How long this answer may take."""
        if asked is None:
            return self.deadline_s
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= self.deadline_s:
            message = f"{DEADLINE_HEADER} must be seconds, above 0 and at most {self.deadline_s:g}, not {asked[:40]!r}."
            raise RequestError(message, param=DEADLINE_HEADER)
        return seconds

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def _parse(self, fields: Mapping[str, Any], kind: Kind, served: Served, request_id: str) -> Call:
        parse = partial(
            parse_call,
            fields,
            kind=kind,
            card=served.card,
            decode=served.decode,
            request_id=request_id,
            default_seed=uuid.uuid4().int >> 65,
        )
        return await self._off_loop(parse)

    def _logprobs_of(self, kind: Kind, served: Served) -> Shape:
        """What puts the log-probabilities of one answer's tokens into OpenAI's shape, where they are asked for."""
        writer = LogprobWriter(served.card.tokenizer, kind)

        async def shape(token_ids: Tokens, logprobs: Logprobs | None) -> dict[str, Any] | None:
            if logprobs is None:
                return None
            write = partial(writer.write, token_ids, logprobs)
            return await self._off_loop(write)

        return shape

    def _drawing(self, served: Served, answer_id: str) -> Draw:
        """What puts a canvas into words: its tokens' text is the tokenizer's work."""

        def written(index: int, event: Canvas) -> dict[str, Any]:
            tokenizer = served.card.tokenizer
            texts = [token_text(r.token, token_bytes(tokenizer, r.token)) for r in event.reveals]
            return canvas(answer_id, index, event, texts)

        async def draw(index: int, event: Canvas) -> dict[str, Any]:
            return await self._off_loop(partial(written, index, event))

        return draw

    def abort(self, request_id: str) -> None:
        """Free the rows of a client that left, without waiting for it."""
        task = asyncio.get_running_loop().create_task(self.backend.abort(request_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


@dataclass
class Run:
    """One admitted request: its events, and its end, whichever way it comes (finished, failed, or the client left).

    seconds, deadline: how long it may take, and the end of that on the event loop's clock. slots: of the queue, one for
    each answer it asks for.
    """

    gateway: Gateway
    key: str | None
    seconds: float
    deadline: float
    model: str | None = None
    call: Call | None = None
    slots: int = 1
    left: set[str] = field(default_factory=set)  # ids of its answers that have not ended: they may have rows
    closed: bool = False

    def hold(self, slots: int) -> None:
        """Hold so many slots of the queue. Raises RequestError where they are not free, or can never be."""
        self.gateway.admission.check(slots, self.key)
        self.gateway.admission.enter(self.key, slots - self.slots)
        self.slots = slots

    async def begin(self, call: Call, traceparent: str | None = None) -> AsyncIterator[Event]:
        """Wait for the first event; raises what the backend refuses before anything is sent."""
        self.call, self.left = call, {request.id for request in call.requests}
        events = self._events(call, traceparent)
        first = await anext(events)
        raise_failure(first)
        return _chained(first, events)

    async def _events(self, call: Call, traceparent: str | None) -> AsyncIterator[Event]:
        model = () if self.model is None else (self.model,)
        async with aclosing(self.gateway.backend.generate(call.requests, traceparent, *model)) as events:
            while self.left:
                try:
                    async with asyncio.timeout_at(self.deadline):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    message = f"The answer was not complete after {self.seconds:g} s: ask for fewer tokens."
                    raise RequestError(message, status=504, code="deadline_exceeded") from error
                except UserError:
                    self.left.clear()
                    raise
                if isinstance(event, Finished | Failed):
                    self.left.discard(event.id)
                yield event

    def close(self) -> None:
        """Leave the queue; rows that are still running are aborted."""
        if self.closed:
            return
        self.closed = True
        self.gateway.admission.leave(self.key, self.slots)
        if self.call is not None and self.left:
            self.gateway.abort(self.call.request.id)


async def _chained(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event


def check_model(fields: Mapping[str, Any], served: Sequence[str]) -> str | None:
    """The asked model, one of those served; None where the field is no name (which is refused later)."""
    asked = fields.get("model")
    names = ", ".join(repr(name) for name in served)
    if asked is None:
        raise RequestError(f"model is required: this server has {names}.", param="model")
    if not isinstance(asked, str):
        return None
    if asked not in served:
        message = f"There is no model {asked[:200]!r}: this server has {names}."
        raise RequestError(message, param="model", status=404, code="model_not_found")
    return asked
