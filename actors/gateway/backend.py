"""What a gateway asks of whatever runs the requests: Serve replicas (`actors.gateway.replicas`), or a test's script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from actors.card import ModelCard
from actors.events import Event
from model.config import DecodeConfig
from model.decoding import GenerationRequest


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
