"""Events of the engine as server-sent events, or as the results of a request that does not stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.engine.events import Canvas, Delta, Event, Failed, Finished
from actors.gateway.backend import Unavailable
from actors.protocol.fields import RequestError
from actors.protocol.logprobs import Logprobs, Tokens
from actors.protocol.responses import DONE, Reply, error_body, sse
from model.decoding import GenerationResult
from model.errors import JobError, UserError

Draw = Callable[[int, Canvas], Awaitable[dict[str, Any]]]
Shape = Callable[[Tokens, Logprobs | None], Awaitable[dict[str, Any] | None]]


@dataclass(frozen=True)
class Choice:
    """One of the answers that a request asks for. index: from 0; shape: of its log-probabilities, piece by piece."""

    index: int
    shape: Shape


Choices = Mapping[str, Choice]  # by the id that its events carry, in the order of their indices


class EventStream(StreamingResponse):
    """Server-sent events that run `close` however the response ends: sent, failed, or cancelled by a disconnect."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._closing = [close]

    def then(self, close: Callable[[], None]) -> None:
        """Run this too, after what runs at the end already."""
        self._closing.append(close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for close in self._closing:
                close()


async def stream_events(reply: Reply, events: AsyncIterator[Event], choices: Choices, draw: Draw) -> AsyncIterator[str]:
    """The events as SSE text. What fails after the status was sent becomes an error event, and no [DONE] follows it."""
    ended: dict[int, GenerationResult] = {}
    try:
        for chunk in reply.opening(len(choices)):
            yield sse(chunk)
        async for event in events:
            raise_failure(event)
            choice = choices[event.id]
            if isinstance(event, Delta) and (event.text or event.logprobs):
                logprobs = await choice.shape(event.token_ids, event.logprobs)
                yield sse(reply.delta(choice.index, event.text, logprobs))
            elif isinstance(event, Canvas):
                yield sse(await draw(choice.index, event), event="canvas")
            elif isinstance(event, Finished):
                ended[choice.index] = event.result
                last = [reply.closing(choice.index, event.result)]
                if len(ended) < len(choices):
                    yield sse(last[0])
                else:
                    last += reply.tail([ended[index] for index in sorted(ended)])
                    yield "".join(map(sse, last)) + DONE
    except (UserError, JobError) as error:
        yield sse(error_sent(error)[1])


async def results_of(events: AsyncIterator[Event], choices: Choices) -> list[GenerationResult]:
    """The result of every choice, in their order."""
    ended: dict[str, GenerationResult] = {}
    async for event in events:
        raise_failure(event)
        if isinstance(event, Finished):
            ended[event.id] = event.result
            if len(ended) == len(choices):
                return [ended[request_id] for request_id in choices]
    raise JobError("The engine ended this request without an answer: send it again.")


def error_sent(error: UserError | JobError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of what went wrong, the same whether the answer had begun or not."""
    if isinstance(error, RequestError):
        return error.status, error_body(str(error), error.status, param=error.param, code=error.code)
    status = 400 if isinstance(error, UserError) else 503 if isinstance(error, Unavailable) else 500
    return status, error_body(str(error), status)


def failure_of(event: Failed) -> JobError:
    """What a failed run is to the client."""
    return (Unavailable if event.elsewhere else JobError)(event.message)


def raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise failure_of(event)
