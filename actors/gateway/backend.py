"""What a gateway asks of whatever runs the requests: Serve replicas (`actors.gateway.replicas`), or a test's script."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.engine.events import Event
from actors.gateway.exposition import Scrape
from actors.protocol.card import ModelCard
from model.config import DecodeConfig
from model.decoding import GenerationRequest
from model.errors import JobError


class Unavailable(JobError):
    """No engine can take the request now; the same request may succeed later (HTTP 503)."""


@dataclass(frozen=True)
class Served:
    """What the gateway must know of its engine. created: seconds since 1970."""

    card: ModelCard
    decode: DecodeConfig
    created: int


class Backend(Protocol):
    """Where requests run. `generate` yields events up to one Finished of each of the requests, or one Failed; raises
    UserError or JobError. They are the choices of one call: the first has its id, and encodes the prompt that all have.
    `abort` frees them all by that id.

    model: one of the further models by name; None is the default one. traceparent: of the request's span, where it is
    traced. retries: runs begun again on another engine.
    """

    retries: int

    async def served(self, model: str | None = None) -> Served: ...

    def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None, model: str | None = None
    ) -> AsyncGenerator[Event, None]: ...

    async def abort(self, request_id: str) -> None: ...

    async def ready(self) -> bool: ...

    async def metrics(self) -> Scrape: ...
