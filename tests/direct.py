"""A real gateway over real engine replicas without Serve: both in this process, HTTP through httpx's ASGI transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from httpx import ASGITransport

from actors.engine.events import Event
from actors.gateway.access import Access
from actors.gateway.admission import Admission
from actors.gateway.app import create_app
from actors.gateway.backend import Backend, Served
from actors.gateway.body import BodyReader
from actors.gateway.exposition import Scrape
from actors.gateway.gateway import Gateway
from actors.gateway.observing import make_observer
from actors.serve_args import ServeArgs
from actors.serving.replica import EngineReplica, Refused
from model.decoding import GenerationRequest
from model.errors import UserError


class DirectBackend:
    """The first replica answers; all of them tell their metrics."""

    def __init__(self, *replicas: EngineReplica) -> None:
        self.replicas = replicas
        self.silent = 0
        self.retries = 0

    async def served(self) -> Served:
        return await self.replicas[0].served()

    async def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None
    ) -> AsyncGenerator[Event, None]:
        async for events in self.replicas[0].generate(tuple(requests), "direct", traceparent):
            for event in events:
                if isinstance(event, Refused):
                    raise UserError(event.message)
                yield event

    async def abort(self, request_id: str) -> None:
        await self.replicas[0].abort(request_id)

    async def ready(self) -> bool:
        return await self.replicas[0].ready()

    async def metrics(self) -> Scrape:
        return Scrape(tuple([await replica.metrics() for replica in self.replicas]), self.silent)


def gateway_over(
    backend: Backend,
    *,
    keys: tuple[str, ...] = (),
    admission: Admission | None = None,
    bodies: BodyReader | None = None,
    deadline_s: float = 600.0,
    further: tuple[str, ...] = (),
    **args: Any,
) -> Gateway:
    """A gateway over any backend; args: of ServeArgs, for what it observes with."""
    admission = admission or Admission(8)
    observer = make_observer(ServeArgs.model_validate({"model": "tiny", **args}), backend, admission)
    return Gateway(backend, Access(keys), admission, bodies or BodyReader(2**20, 30), observer, deadline_s, further)


def direct_app(model: Path, *, keys: tuple[str, ...] = (), **args: Any) -> tuple[FastAPI, Gateway]:
    """The application over one engine replica with a few rows; args: of ServeArgs."""
    serve_args = ServeArgs.model_validate(
        {"model": str(model), "served_name": "tiny", "engine": {"max_rows": 4}, "max_queue": 8, **args}
    )
    gateway = gateway_over(DirectBackend(EngineReplica(serve_args)), keys=keys)
    return create_app(gateway), gateway


@asynccontextmanager
async def client_of(app: FastAPI, address: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    """A client that seems to come from `address`."""
    transport = ASGITransport(app, client=(address, 5), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
