"""The path of one request: access, shape and size, validation (`parse_call`), admission; then events from the backend.

Knows nothing of Ray: server.py gives it a backend of engine replicas, a test may give it a scripted one. The first
event is awaited before a status is sent, so what the engine refuses is still an honest 400 or 500.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from actors.access import Access
from actors.events import Event, Failed, Finished
from actors.fields import RequestError
from actors.gateway.admission import Admission
from actors.gateway.backend import Backend, Served
from actors.gateway.body import read_fields
from actors.gateway.streams import EventStream, Shape, raise_failure, result_of, stream_events
from actors.logprobs import Logprobs, LogprobWriter, Tokens
from actors.protocol import Call, Kind, parse_call
from actors.responses import Reply
from model.errors import JobError, UserError

log = logging.getLogger("ray.serve.blockcast")


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
        fields = await read_fields(http, self.max_body_bytes)
        served = await self.backend.served()
        check_model(fields, served.card.name)
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
                return EventStream(stream_events(reply, events, shape), run.close)
            result = await result_of(events)
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
        raise_failure(first)
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


async def _chained(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event


def check_model(fields: Mapping[str, Any], served: str) -> None:
    asked = fields.get("model")
    if asked is None:
        raise RequestError(f"model is required: this server has {served!r}.", param="model")
    if isinstance(asked, str) and asked != served:
        message = f"There is no model {asked[:200]!r}: this server has {served!r}."
        raise RequestError(message, param="model", status=404, code="model_not_found")
