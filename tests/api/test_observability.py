"""A second application on the same Serve, as an operator would run it: two engine replicas, API keys, JSON logs, spans.

What a scrape, the log files and an OTLP collector get to see of it, and what they never get to see.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from actors.serve_args import GATEWAY, REPLICA
from tests.api.conftest import Server, free_port
from tests.exposition import Values, read, total

pytestmark = pytest.mark.slow
APPLICATION, MODEL = "observed", "watched"
KEY = "sesame-open-NONCEKEY"
NONCE = "NONCEPROMPT"
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": f"{NONCE} a", "max_tokens": 24, "user": "ann"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"x-request-id": "client-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}


@dataclass
class Collector:
    """An OTLP endpoint over HTTP: keeps (service, span) of all that it is sent."""

    port: int = field(default_factory=free_port)
    spans: list[tuple[str, Any]] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        message = ExportTraceServiceRequest.FromString(body)
        with self.arrived:
            for resource in message.resource_spans:
                attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(attributes["service.name"], span) for span in scope.spans]
            self.arrived.notify_all()

    def wait_for(self, wanted: Any) -> list[tuple[str, Any]]:
        """All spans, once `wanted` accepts them."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: wanted(self.spans), timeout=60), [s.name for _, s in self.spans]
            return list(self.spans)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    endpoint = ThreadingHTTPServer(("127.0.0.1", collector.port), Handler)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    yield collector
    endpoint.shutdown()


@pytest.fixture(scope="module")
def http(
    server: Server, successor_model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    from ray import serve

    from actors.serve_args import ServeArgs
    from actors.server import build

    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n")
    args = ServeArgs.model_validate(
        {
            "model": str(successor_model),
            "served_name": MODEL,
            "engine": {"max_rows": 4},
            "min_replicas": 2,
            "max_replicas": 2,
            "cpus_per_replica": 0.25,
            "drain_s": 0,
            "api_keys_file": str(keys),
            "log_format": "json",
            "tracing": {"exporter": "otlp", "endpoint": collector.url, "sampling_ratio": 0.0},
        }
    )
    serve.run(build(args), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    headers = {"Authorization": f"Bearer {KEY}"}
    yield httpx.Client(base_url=f"{server.url}/{APPLICATION}", headers=headers, timeout=60, trust_env=False)
    serve.delete(APPLICATION)


@pytest.fixture(scope="module")
def answers(http: httpx.Client) -> list[dict[str, Any]]:
    """Eight answers of the application, the last one traced and with an id of the client's."""
    sent: list[dict[str, str]] = [*([{}] * 7), SENT]
    responses = [http.post("/v1/completions", json=PROMPT, headers=headers) for headers in sent]
    assert [response.status_code for response in responses] == [200] * 8
    return [response.json() for response in responses]


def metrics_of(http: httpx.Client) -> Values:
    response = http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain"), response.text
    return read(response.text)


def scrape_with(http: httpx.Client, silent: int) -> Values:
    """A scrape in which so many replicas were silent: on a busy machine one may be late that is well."""
    return next(v for v in (metrics_of(http) for _ in range(20)) if total(v, "blockcast_replicas_silent") == silent)


def replicas_of(values: Values, name: str) -> set[str]:
    return {dict(labels)["replica"] for n, labels in values if n == name}


def test_one_scrape_tells_of_both_replicas_and_of_the_gateway(
    http: httpx.Client, answers: list[dict[str, Any]]
) -> None:
    values = scrape_with(http, silent=0)
    engines = replicas_of(values, "blockcast_rounds_total")
    assert len(engines) == 2 and replicas_of(values, "blockcast_replica_up") == engines
    assert total(values, "blockcast_replica_up") == 2
    (gateway,) = replicas_of(values, "blockcast_requests_total")
    assert gateway not in engines
    assert total(values, "blockcast_requests_total", outcome="length", model=MODEL) == 8
    assert total(values, "blockcast_tokens_per_forward_count") == 8
    steps = sum(sum(answer["diffusion"]["steps_per_block"]) for answer in answers)
    assert total(values, "blockcast_steps_per_block_sum") == steps
    assert {dict(labels)["model"] for _, labels in values} == {MODEL}


def test_metrics_are_for_those_who_may_ask(http: httpx.Client) -> None:
    assert http.get("/metrics", headers={"Authorization": "Bearer other"}).status_code == 401


def test_a_replica_that_hangs_is_shown_as_down_and_hides_nobody(
    http: httpx.Client, answers: list[dict[str, Any]]
) -> None:
    title = f"ray::ServeReplica:{APPLICATION}:{REPLICA}"
    mine = psutil.Process().children(recursive=True)
    hanging = next(process for process in mine if " ".join(process.cmdline()).startswith(title))
    scrape_with(http, silent=0)
    hanging.send_signal(signal.SIGSTOP)
    try:
        values = scrape_with(http, silent=1)
    finally:
        hanging.send_signal(signal.SIGCONT)
    assert total(values, "blockcast_replica_up") == 1
    assert len(replicas_of(values, "blockcast_replica_up")) == 2
    assert len(replicas_of(values, "blockcast_rounds_total")) == 1
    assert total(scrape_with(http, silent=0), "blockcast_replica_up") == 2


# ------------------------------------------------------------------------------------------------- logs
def log_files() -> dict[Path, str]:
    """Every file that Ray and Serve wrote for this session."""
    import ray

    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    return {path: path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}


def test_every_request_has_one_json_line(http: httpx.Client, answers: list[dict[str, Any]]) -> None:
    gateways = [text for path, text in log_files().items() if f"{APPLICATION}_{GATEWAY}" in path.name]
    lines = [json.loads(line) for text in gateways for line in text.splitlines()]
    requests = {line["id"]: line for line in lines if line["message"] == "request"}
    assert set(requests) >= {answer["id"] for answer in answers}
    line = requests[answers[-1]["id"]]
    assert line["client_request_id"] == "client-1" and len(line["key"]) == 12 and line["user"] == "ann"
    assert (line["status"], line["outcome"], line["model"]) == (200, "length", MODEL)
    assert line["forwards"] == answers[-1]["diffusion"]["forwards"]
    assert 0 < line["queue_s"] + line["prefill_s"] < line["ttft_s"] <= line["seconds"]
    assert line["completion_tokens"] == 24


def test_no_log_file_of_the_session_holds_a_prompt_or_a_key(http: httpx.Client, answers: list[dict[str, Any]]) -> None:
    for bad in ({"n": 0}, {"prompt": [NONCE] * 2}, {"model": NONCE}, {"stop": [NONCE] * 9}, {"max_tokens": 10**6}):
        assert http.post("/v1/completions", json={**PROMPT, **bad}).status_code in (400, 404)
    assert http.post("/v1/completions", json=PROMPT, headers={"Authorization": f"Bearer {KEY}x"}).status_code == 401
    with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as stream:
        assert next(stream.iter_lines())
    texts = log_files()
    assert len(texts) > 10 and any(answers[0]["id"] in text for text in texts.values())
    for path, text in texts.items():
        assert NONCE not in text and "NONCEKEY" not in text, f"{path} holds what is nobody's business"


# ------------------------------------------------------------------------------------------------- spans
def test_a_traced_request_is_one_tree_over_gateway_and_replica(
    collector: Collector, answers: list[dict[str, Any]]
) -> None:
    blocks = answers[-1]["diffusion"]["steps_per_block"]
    told = collector.wait_for(lambda spans: len(spans) >= 2 + len(blocks))
    assert {span.trace_id.hex() for _, span in told} == {TRACE}, "only the request whose client asked for it"
    ((service, request),) = [(service, span) for service, span in told if span.name == "POST completion"]
    assert service == f"blockcast-{GATEWAY}" and request.parent_span_id.hex() == PARENT
    below = [(service, span) for service, span in told if span.parent_span_id == request.span_id]
    assert {service for service, _ in below} == {f"blockcast-{REPLICA}"} and len(below) == len(told) - 1
    found = sorted((span for _, span in below if span.name == "block"), key=lambda span: span.start_time_unix_nano)
    steps = [{a.key: a.value.int_value for a in span.attributes}["steps"] for span in found]
    assert steps == blocks and {"queue"} <= {span.name for _, span in below}
    for _, span in below:
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
