"""OpenTelemetry spans: one for each request in the gateway; below it, from the engine, queue, prefill and each block.

    request POST chat                     gateway: arrival to the end of the response
      queue | prefill | block 0, 1, ...   replica: times that the engine took itself (actors.engine.timeline)

The gateway decides whether a request is traced, by a client's W3C `traceparent` where it sends one, else by the
sampling ratio, and hands its own `traceparent` to the replica. No span holds a prompt, an answer or a key.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.engine.events import Finished
from actors.engine.timeline import Timeline, now_ns
from actors.serve_args import TracingArgs
from model.errors import UserError

if TYPE_CHECKING:
    from actors.gateway.record import RequestRecord

HEADER = "traceparent"
EXPORT_EVERY_MS = 1000
W3C = TraceContextTextMapPropagator()


def check_tracing(args: TracingArgs) -> None:
    """Raises UserError where the exporter is not installed."""
    if args.exporter == "otlp" and importlib.util.find_spec("opentelemetry.exporter.otlp") is None:
        raise UserError("tracing.exporter otlp is not installed: pip install 'blockcast[otlp]' on every node.")


def make_tracer(args: TracingArgs, *, part: str, replica: str) -> Tracer | None:
    """The tracer of a gateway or a replica, by the name of its deployment and its own; None with exporter "none"."""
    check_tracing(args)
    if args.exporter == "none":
        return None
    return Tracer(_processor(args), args.sampling_ratio, part=part, replica=replica)


def _processor(args: TracingArgs) -> SpanProcessor:
    if args.exporter == "console":
        return SimpleSpanProcessor(ConsoleSpanExporter())
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=args.endpoint), schedule_delay_millis=EXPORT_EVERY_MS)


class Tracer:
    """Makes spans and hands them to `processor`. sampling_ratio: share of the requests, 0 to 1, that are traced where
    no client decides."""

    def __init__(self, processor: SpanProcessor, sampling_ratio: float, *, part: str, replica: str) -> None:
        resource = Resource.create({"service.name": f"blockcast-{part}", "service.instance.id": replica})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling_ratio)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("blockcast")

    def begin_request(self, kind: str, headers: Mapping[str, str], began_ns: int) -> RequestSpan:
        """The span of a request; below the client's own where it sends a traceparent."""
        carrier = {name: headers[name] for name in (HEADER, "tracestate") if name in headers}
        parent = W3C.extract(carrier, Context())
        span = self._tracer.start_span(f"POST {kind}", parent, SpanKind.SERVER, start_time=began_ns)
        return RequestSpan(span)

    def engine_spans(self, traceparent: str, ended: Finished | None, timeline: Timeline) -> None:
        """The spans of a request that has ended in the engine; ended: None where it failed."""
        parent = W3C.extract({HEADER: traceparent}, Context())
        begun = timeline.begun_ns or timeline.ended_ns
        self._span("queue", parent, timeline.queued_ns, begun)
        if timeline.begun_ns is None:
            return
        result = ended.result if ended else None
        prefilled = timeline.prefilled_ns or timeline.ended_ns
        if prefilled > begun:
            prompt = {"prompt_tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens} if result else {}
            self._span("prefill", parent, begun, prefilled, prompt)
        if result is not None and result.mode in ("ar", "lossless"):
            self._span("decode", parent, prefilled, timeline.ended_ns, {"tokens": result.completion_tokens})
        for index, block in enumerate(timeline.blocks):
            self._span("block", parent, block.begin_ns, block.end_ns, {"block": index, "steps": block.steps})

    def _span(
        self, name: str, parent: Context, begin_ns: int, end_ns: int, attributes: Mapping[str, int] | None = None
    ) -> None:
        self._tracer.start_span(name, parent, attributes=attributes, start_time=begin_ns).end(end_ns)

    def shut_down(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


class RequestSpan:
    """The open span of one request."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """For the engine's spans; None where the request is not sampled."""
        carrier: dict[str, str] = {}
        W3C.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get(HEADER) if self._span.get_span_context().trace_flags.sampled else None

    def end(self, record: RequestRecord) -> None:
        """The response has been sent, or will never be."""
        span, result = self._span, record.result
        span.set_attribute("blockcast.request_id", record.id)
        span.set_attribute("blockcast.outcome", record.outcome)
        if record.status is not None:
            span.set_attribute("http.response.status_code", record.status)
        if record.call is not None and record.call.model is not None:
            span.set_attribute("gen_ai.request.model", record.call.model)
        if result is not None:
            span.set_attribute("gen_ai.usage.input_tokens", result.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", result.completion_tokens)
            span.set_attribute("blockcast.mode", result.mode)
            span.set_attribute("blockcast.tokens_per_forward", result.tokens_per_forward)
        if record.outcome in ("failed", "deadline"):
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(now_ns())
