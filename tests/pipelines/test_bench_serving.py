"""The benches of serving: what became of a request is told truly, a slope has its noise, and texts are compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from actors.protocol.responses import error_body
from model.errors import UserError
from pipelines.benches.serving.client import Answer, Outcome, Record, Target, ask
from pipelines.benches.serving.memory import BLOCKS, slope_of
from pipelines.benches.serving.setting import ServingBenchConfig, check_threads
from pipelines.benches.serving.tally import Fault, Latency, Tally
from tests.pipelines.test_bench import bench

EXPECTED = Answer("abcd", "length", 4)
FIELDS = {"prompt": "a"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asked(handler: Handler, *, stream: bool, patience_s: float = 20.0) -> Record:
    """One request to a real server that answers with `handler`."""

    async def main() -> Record:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        target = Target(f"http://127.0.0.1:{port}", patience_s=patience_s)
        try:
            async with target.session() as session:
                return await ask(session, target, "/v1/completions", FIELDS, EXPECTED, Record(stream))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def whole(text: str = "abcd", finish: str = "length", tokens: int = 4) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        choice = {"text": text, "finish_reason": finish}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": tokens}})

    return handle


def refusal(status: int, body: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    return handle


def events(*sent: str, cut: bool = False) -> Handler:
    """A stream of these lines. cut: the connection is dropped in the middle of the body."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in sent:
            await response.write(f"{one}\n\n".encode())
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


def text(*pieces: str, finish: str | None = None) -> list[str]:
    chunks = [{"choices": [{"text": piece, "finish_reason": None}], "usage": None} for piece in pieces]
    last = {"choices": [{"text": "", "finish_reason": finish}], "usage": None}
    return [f"data: {json.dumps(chunk)}" for chunk in [*chunks, *([last] if finish else [])]]


USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 4}}'
DONE = "data: [DONE]"
ERROR = f"data: {json.dumps(error_body('It broke.', 500))}"
CANVAS = 'event: canvas\ndata: {"id": "x", "block_start": 0, "reveals": []}'


def test_a_whole_answer_is_right_only_if_text_finish_reason_and_usage_are() -> None:
    assert asked(whole(), stream=False).outcome is Outcome.RIGHT
    for other in (whole("abcx"), whole(finish="stop"), whole(tokens=5)):
        assert asked(other, stream=False).outcome is Outcome.WRONG


def test_a_stream_is_right_only_with_all_its_text_its_usage_and_its_end() -> None:
    good = events(CANVAS, *text("ab", "cd", finish="length"), USAGE, DONE)
    record = asked(good, stream=True)
    assert record.outcome is Outcome.RIGHT and record.first is not None and record.first <= record.ended
    assert asked(events(*text("ab", finish="length"), USAGE, DONE), stream=True).outcome is Outcome.WRONG
    assert asked(events(*text("abcde"), ERROR), stream=True).outcome is Outcome.WRONG
    for unfinished in (
        events(*text("ab", "cd", finish="length"), USAGE),
        events(*text("ab", "cd"), USAGE, DONE),
        events(*text("ab", "cd", finish="length"), DONE),
        events(*text("ab", "cd", finish="length"), USAGE, DONE, USAGE),
        events(*text("ab"), ERROR, DONE),
    ):
        assert asked(unfinished, stream=True).outcome is Outcome.LOST


def test_an_error_is_proper_only_in_openai_s_shape() -> None:
    good = json.dumps(error_body("Come back.", 503))
    assert asked(refusal(503, good), stream=False).outcome is Outcome.ERROR
    assert asked(refusal(503, good), stream=True).outcome is Outcome.ERROR
    assert asked(events(*text("ab"), ERROR), stream=True).outcome is Outcome.ERROR
    bare = 'data: {"error": {"message": "It broke."}}'
    assert asked(events(*text("ab"), bare), stream=True).outcome is Outcome.LOST
    for status, body in ((500, "It broke."), (400, good), (503, '{"detail": "no"}')):
        assert asked(refusal(status, body), stream=False).outcome is Outcome.LOST


def test_a_connection_that_breaks_is_cut_and_silence_is_lost() -> None:
    assert asked(refusal(500, "Internal Server Error"), stream=False).outcome is Outcome.CUT  # Serve's proxy
    assert asked(events(*text("ab"), cut=True), stream=True).outcome is Outcome.CUT
    assert asked(events(*text("ax"), cut=True), stream=True).outcome is Outcome.WRONG

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    record = asked(silent, stream=False, patience_s=0.2)
    assert record.outcome is Outcome.LOST and "nothing more in 0.2 s" in record.detail


def test_a_cut_connection_is_a_reset_only_beside_a_fault_that_cuts_connections() -> None:
    records = [
        Record(True, begun, ended=begun + 1, outcome=outcome)
        for begun, outcome in ((0.0, Outcome.CUT), (5.0, Outcome.CUT), (6.0, Outcome.RIGHT), (7.0, Outcome.LOST))
    ]
    faults = [Fault(at=5.5, over=5.8)]
    cutting = Tally.of(records, faults, cuts_connections=True)
    assert (cutting.resets, cutting.lost, cutting.right, cutting.requests) == (1, 2, 1, 4)
    assert len(cutting.complaints) == 2
    quiet = Tally.of(records, faults)
    assert (quiet.resets, quiet.lost) == (0, 3)


def test_latencies_are_of_right_answers_and_ttft_of_streams() -> None:
    records = [Record(bool(i % 2), 0.0, first=i / 2, ended=float(i), outcome=Outcome.RIGHT) for i in range(1, 101)]
    records.append(Record(True, 0.0, ended=500.0, outcome=Outcome.ERROR))
    latency = Latency.of(records)
    assert latency.p50 == pytest.approx(50.5) and latency.p99 == pytest.approx(99.01)
    assert latency.ttft_p50 == pytest.approx(25.0)


def test_a_leak_is_a_slope_above_its_noise_and_noise_alone_is_not() -> None:
    random = np.random.default_rng(0)
    seconds = np.arange(0, 1800, 5.0)
    noise = random.normal(0, 1, len(seconds))
    leak = slope_of(seconds, 200 + 10 * seconds / 3600 + noise)
    assert not leak.flat and leak.per_hour == pytest.approx(10, abs=leak.noise)
    quiet = [slope_of(seconds, 200 + random.normal(0, 1, len(seconds))).flat for _ in range(40)]
    assert sum(quiet) >= 32
    assert np.isnan(slope_of(seconds[: BLOCKS * 2], noise[: BLOCKS * 2]).per_hour)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(UserError, match="this machine has 2 cores"):
        check_threads(ServingBenchConfig(threads=2), 2, cores=2)


@pytest.mark.slow
def test_serving_is_measured_against_the_engine_with_equal_texts(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "serve.json"
    questions: list[Any] = ["--tasks", 4, "--max_tokens", 16, "--rows", 4]
    small = ["--haproxy", "false", "--rounds", 1, "--clients", 4, "--requests", 20, "--streams", 4]
    content = bench("serve", output, "--model", tiny_model, *small, *questions)
    assert [line["part"] for line in content["table"]] == ["streams", "streams", "gateway"]
    engine, http, gateway = content["table"]
    assert engine["tokens"] == http["tokens"] > 0 and gateway["requests/s"] > 0
    assert engine["TTFT p50 s"] > 0 and engine["first block p50 s"] > 0  # of a model that writes hardly any text
    assert set(content["ratios"]) == {
        "tokens/s through HTTP over the engine, Serve's proxy",
        "first block over first sub-block, beside Serve's proxy",
    }
