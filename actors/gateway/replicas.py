"""The gateway's backend over Serve handles: what Ray reports becomes UserError or JobError.

When a client leaves, cancelling the call aborts its row; because cancellation is known to get lost on chains of
handles, every replica is also asked to abort it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.events import Event
from actors.gateway.backend import Served
from actors.replica import Refused
from model.decoding import GenerationRequest
from model.errors import JobError, UserError

GONE = "The engine replica that worked on this request went away: send it again."


class ReplicaBackend:
    """The gateway's `Backend` over Serve handles. What Ray reports becomes UserError or JobError."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._served: Served | None = None

    async def served(self) -> Served:
        if self._served is None:
            self._served = await self._ask("served")
        return self._served

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        responses: Any = self._handle.options(stream=True, method_name="generate").remote(request)
        try:
            async for events in responses:
                for event in events:
                    if isinstance(event, Refused):
                        raise UserError(event.message)
                    yield event
        except (RayError, RayServeException) as error:
            raise JobError(GONE) from error
        finally:
            responses.cancel()

    async def abort(self, request_id: str) -> None:
        await self._handle.broadcast("abort", request_id).results_async()

    async def ready(self) -> bool:
        return bool(await self._ask("ready"))

    async def _ask(self, method: str) -> Any:
        try:
            return await self._handle.options(method_name=method).remote()
        except (RayError, RayServeException) as error:
            raise JobError("No engine replica answers: try again in a moment.") from error
