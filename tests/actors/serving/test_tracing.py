"""Spans through a real gateway and a real engine: one tree for each request, with the engine's own times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.serve_args import TracingArgs
from actors.serving.tracing import Tracer, make_tracer
from model.errors import UserError
from tests.actors.engine.test_metrics import successor_model as successor_model  # the fixture
from tests.direct import client_of, direct_app

PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "a" * 20, "max_tokens": 24}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(
    model: Path, *bodies: dict[str, Any], ratio: float = 1.0, headers: dict[str, str] | None = None
) -> tuple[list[dict[str, Any]], list[ReadableSpan]]:
    """The answers to these bodies, one after the other, and all spans that gateway and replica exported."""
    app, gateway = direct_app(model)
    exporter = InMemorySpanExporter()
    tracers = [Tracer(SimpleSpanProcessor(exporter), ratio, part=part, replica=part) for part in ("gateway", "engine")]
    object.__setattr__(gateway.observer, "tracer", tracers[0])
    gateway.backend.replicas[0]._shelf.default.observer._tracer = tracers[1]  # type: ignore[attr-defined]

    async def talk() -> list[dict[str, Any]]:
        async with client_of(app) as client:
            responses = [await client.post("/v1/completions", json=body, headers=headers) for body in bodies]
            return [response.json() for response in responses]

    return asyncio.run(talk()), list(exporter.get_finished_spans())


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time or 0)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def test_a_request_has_a_span_with_queue_prefill_and_every_block_below_it(successor_model: Path) -> None:
    ((answer,), spans) = traced(successor_model, PROMPT)
    (request,) = named(spans, "POST completion")
    (queue,), (prefill,), blocks = named(spans, "queue"), named(spans, "prefill"), named(spans, "block")
    assert request.parent is None and len(spans) == 3 + len(blocks)
    for child in (queue, prefill, *blocks):
        assert child.parent is not None and child.parent.span_id == request.context.span_id
        assert child.context.trace_id == request.context.trace_id
        assert times(request)[0] <= times(child)[0] <= times(child)[1] <= times(request)[1]
    assert times(queue)[1] == times(prefill)[0]
    steps = [span.attributes["steps"] for span in blocks if span.attributes]
    assert steps == answer["diffusion"]["steps_per_block"] and len(steps) >= 3
    assert [span.attributes["block"] for span in blocks if span.attributes] == list(range(len(blocks)))
    assert request.attributes is not None
    assert request.attributes["blockcast.request_id"] == answer["id"]
    assert request.attributes["gen_ai.usage.output_tokens"] == 24
    assert request.attributes["http.response.status_code"] == 200
    assert request.resource.attributes["service.name"] == "blockcast-gateway"
    assert blocks[0].resource.attributes["service.name"] == "blockcast-engine"


def test_a_client_s_trace_is_gone_on_with_and_its_decision_holds(successor_model: Path) -> None:
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    _, spans = traced(successor_model, PROMPT, ratio=0.0, headers=sampled)
    (request,) = named(spans, "POST completion")
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE} and named(spans, "block")
    _, spans = traced(successor_model, PROMPT, ratio=1.0, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert spans == []


@pytest.mark.parametrize(
    "header", ["", "rubbish", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01" + "x" * 9000]
)
def test_a_broken_traceparent_begins_a_trace_of_our_own(successor_model: Path, header: str) -> None:
    _, spans = traced(successor_model, PROMPT, headers={"traceparent": header})
    (request,) = named(spans, "POST completion")
    assert request.parent is None and f"{request.context.trace_id:032x}" != TRACE


def test_what_is_not_sampled_leaves_no_span_anywhere(successor_model: Path) -> None:
    _, spans = traced(successor_model, PROMPT, PROMPT, ratio=0.0)
    assert spans == []


def test_decoding_token_by_token_is_one_span(successor_model: Path) -> None:
    _, spans = traced(successor_model, {**PROMPT, "diffusion": {"mode": "ar"}})
    assert named(spans, "block") == []
    (decode,) = named(spans, "decode")
    assert decode.attributes == {"tokens": 24}


def test_a_refused_request_has_a_span_too_and_no_span_holds_the_prompt(successor_model: Path) -> None:
    _, spans = traced(
        successor_model, {**PROMPT, "prompt": "NONCE" * 5, "user": "NONCE"}, {**PROMPT, "n": 0, "stop": "NONCE"}
    )
    requests = named(spans, "POST completion")
    outcomes = [span.attributes["blockcast.outcome"] for span in requests if span.attributes]
    assert sorted(map(str, outcomes)) == ["length", "refused"]
    assert all(span.status.is_unset for span in requests), "what a client did wrong is no error of the server"
    assert "NONCE" not in "".join(json.dumps(json.loads(span.to_json())) for span in spans)


def test_exporters_are_made_from_arguments_and_none_makes_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_tracer(TracingArgs(), part="x", replica="y") is None
    tracer = make_tracer(TracingArgs(exporter="console", sampling_ratio=1.0), part="x", replica="y")
    assert tracer is not None
    tracer.shut_down()


def test_an_exporter_that_is_not_installed_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'blockcast\[otlp\]'"):
        make_tracer(TracingArgs(exporter="otlp"), part="x", replica="y")
