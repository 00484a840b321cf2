"""Events of the engine as server-sent events, or as the one result of a request that does not stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.events import Canvas, Delta, Event, Failed, Finished
from actors.logprobs import Logprobs, Tokens
from actors.responses import DONE, Reply, canvas, error_body, sse
from model.decoding import GenerationResult
from model.errors import JobError, UserError

Shape = Callable[[Tokens, Logprobs | None], Awaitable[dict[str, Any] | None]]


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


async def stream_events(reply: Reply, events: AsyncIterator[Event], shape: Shape) -> AsyncIterator[str]:
    """The events as SSE text. What fails after the status was sent becomes an error event, and no [DONE] follows it."""
    try:
        for chunk in reply.opening():
            yield sse(chunk)
        async for event in events:
            raise_failure(event)
            if isinstance(event, Delta) and (event.text or event.logprobs):
                yield sse(reply.delta(event.text, await shape(event.token_ids, event.logprobs)))
            elif isinstance(event, Canvas):
                yield sse(canvas(event), event="canvas")
            elif isinstance(event, Finished):
                yield "".join(sse(chunk) for chunk in reply.closing(event.result)) + DONE
    except (UserError, JobError) as error:
        yield sse(error_body(str(error), 500))


async def result_of(events: AsyncIterator[Event]) -> GenerationResult:
    async for event in events:
        raise_failure(event)
        if isinstance(event, Finished):
            return event.result
    raise JobError("The engine ended this request without an answer: send it again.")


def raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise JobError(event.message)
