"""One request as those who run the server see it: what it counted for, its log line and its span, from one record.

    record = observer.begin(http.headers, "chat")
    response = await observer.watch(record, answer(http, "chat", record))

The path of a request tells the record little: who asks (`key`), what was asked (`called`), and lets it listen to the
events (`overhear`). A stream's record ends when the response does, any other when it is made.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass

from starlette.responses import Response

from actors.engine.events import Delta, Event, Failed, Finished
from actors.engine.timeline import Timeline, now_ns
from actors.gateway.exposition import encode
from actors.gateway.metrics import INTERNAL, KINDS, GatewayMetrics, Outcome, Scraper
from actors.gateway.request_log import RequestLog
from actors.gateway.streams import EventStream, error_sent, failure_of
from actors.protocol.calls import Call, Kind
from actors.protocol.responses import Totals
from actors.serving.tracing import RequestSpan, Tracer
from model.decoding import GenerationResult
from model.errors import JobError, UserError

CLIENT_ID_LENGTH = 128  # characters of x-request-id that are kept
OUTCOMES: dict[int, Outcome] = {429: "overloaded", 504: "deadline"}


@dataclass(frozen=True)
class Observer:
    """Where records end up. scraper: of the metrics of the whole application; tracer: None without tracing."""

    metrics: GatewayMetrics
    scraper: Scraper
    log: RequestLog
    tracer: Tracer | None = None

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of GET /metrics, in Prometheus' text format or what the Accept header prefers."""
        return encode(await self.scraper.scrape(), accept)

    def begin(self, headers: Mapping[str, str], kind: Kind) -> RequestRecord:
        """A request has arrived. headers: lower-case names."""
        return RequestRecord(self, headers, kind)

    async def watch(self, record: RequestRecord, response: Awaitable[Response]) -> Response:
        """The response, while the record notes how it comes about; whatever is raised goes on."""
        try:
            made = await response
        except BaseException as error:
            record.fail(error)
            record.end()
            raise
        if isinstance(made, EventStream):
            record.begun = True
            made.then(record.end)
        else:
            record.end()
        return made


class RequestRecord:
    """One request from its arrival to its end. id: of its answer."""

    def __init__(self, observer: Observer, headers: Mapping[str, str], kind: Kind) -> None:
        self._observer = observer
        self.kind: Kind = kind
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self.client_id = client_id(headers.get("x-request-id"))
        self.key: str | None = None  # a name of the API key, never the key
        self.call: Call | None = None
        self.result: Totals | None = None  # of all its answers, once the last has ended
        self.begun = False  # whether a stream's status has been sent
        self.error: str | None = None  # its kind
        self._error_status = 200
        self.message: str | None = None  # of the engine's failure; what a client did wrong may quote the prompt
        self.first_s: float | None = None
        self.timeline: Timeline | None = None  # in the engine that ended it
        self._results: dict[str, GenerationResult] = {}  # by id, of the answers that have ended
        self._last_delta: dict[str, float] = {}
        self._began = time.monotonic()
        self._headers = headers
        self._began_ns = now_ns()
        self._span: RequestSpan | None = None

    @property
    def traceparent(self) -> str | None:
        """For the engine's spans; None where this request is not traced."""
        return self._span.traceparent if self._span else None

    @property
    def status(self) -> int | None:
        """The HTTP status of the answer; None: the client left before there was one."""
        if self.begun:
            return 200
        return None if self.outcome == "left" else self._error_status

    @property
    def outcome(self) -> Outcome:
        """How the request ended, or ends if nothing else comes."""
        if self.error is not None:
            return OUTCOMES.get(self._error_status, "refused" if self._error_status < 500 else "failed")
        if self.result is None:
            return "left"
        return "stop" if self.result.finish_reason == "stop" else "length"

    @property
    def seconds(self) -> float:
        """Since the arrival."""
        return time.monotonic() - self._began

    def known_as(self, key: str | None) -> None:
        """The client may ask, under this name; only now a traceparent of its own counts."""
        self.key = key
        if self._observer.tracer is not None:
            self._span = self._observer.tracer.begin_request(self.kind, self._headers, self._began_ns)

    def called(self, call: Call) -> None:
        """The request is valid."""
        self.call = call

    async def overhear(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """The same events, noted as they pass."""
        try:
            async for event in events:
                self._hear(event)
                yield event
        except (UserError, JobError) as error:
            self.fail(error)
            raise

    def _hear(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._heard_delta(event.id)
        elif isinstance(event, Finished):
            self._heard_end(event)
        elif isinstance(event, Failed):
            self.timeline = event.timeline
            self.fail(failure_of(event))

    def _heard_delta(self, answer: str) -> None:
        now = self.seconds
        if self.first_s is None:
            self.first_s = now
            self._observer.metrics.first_token(now)
        if answer in self._last_delta:
            self._observer.metrics.gap(now - self._last_delta[answer])
        self._last_delta[answer] = now

    def _heard_end(self, event: Finished) -> None:
        """The first answer's times stand for all: the others wait for it to read the prompt."""
        self._results[event.id] = event.result
        if event.id == self.id:
            self.timeline = event.timeline
        ids = [request.id for request in self.call.requests] if self.call else [event.id]
        if len(self._results) == len(ids):
            self.result = Totals.of([self._results[id_] for id_ in ids])

    def fail(self, error: BaseException) -> None:
        """The request ends with this error; the first one counts. Nobody failed where the client left."""
        if self.error is not None or not isinstance(error, Exception):
            return
        status = self._error_status = status_of(error)
        known = isinstance(error, UserError | JobError)
        self.error = KINDS.get(status, KINDS[400 if status < 500 else 500]) if known else INTERNAL
        self.message = str(error) if isinstance(error, JobError) else None

    def end(self) -> None:
        """The response has been sent, or will never be."""
        if self.error is not None:
            self._observer.metrics.error(self.error)
        self._observer.metrics.ended(self.kind, self.outcome, self.seconds)
        self._observer.log.write(self)
        if self._span is not None:
            self._span.end(self)


def status_of(error: Exception) -> int:
    """The HTTP status that the application answers an error with."""
    return error_sent(error)[0] if isinstance(error, UserError | JobError) else 500


def client_id(header: str | None) -> str | None:
    """The client's own id for its request; None unless it is 1 to 128 printable ASCII characters."""
    if header and len(header) <= CLIENT_ID_LENGTH and header.isascii() and header.isprintable():
        return header
    return None
