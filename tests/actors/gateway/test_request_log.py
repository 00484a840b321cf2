"""One line for every request that ended, which says how and for whom, and never holds a prompt, an answer or a key."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from actors.engine.events import Delta, Failed
from actors.engine.loop import Engine
from actors.engine.observer import EngineObserver
from actors.gateway.access import load_key_hashes
from actors.gateway.exposition import encode, merge
from actors.gateway.record import client_id
from actors.serve_args import TracingArgs
from actors.serving.logs import OURS, join_serve_log
from model.backbone import Backbone
from model.errors import JobError, UserError
from tests.actors.gateway.test_gateway import GOOD, PROMPT, ScriptedBackend, with_client
from tests.exposition import read, total

KEY = "sesame-open-NONCEKEY"
KEYS = load_key_hashes(None, {"BLOCKCAST_API_KEYS": KEY})
NONCE = "NONCEPROMPT"
STREAM = {**PROMPT, "stream": True}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(params=["json", "text"])
def log_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The request lines, whichever the format."""
    lines = []
    for record in caplog.records:
        if record.name == "ray.serve.blockcast":
            text = record.getMessage()
            if text == "request":
                lines.append({name: getattr(record, name) for name in FIELDS})
            else:
                parts = text.removeprefix("request ")
                lines.append(dict(_pairs(parts)))
    return lines


FIELDS = [
    "id",
    "client_request_id",
    "endpoint",
    "key",
    "model",
    "user",
    "stream",
    "choices",
    "status",
    "outcome",
    "error",
    "error_message",
    "seconds",
    "queue_s",
    "prefill_s",
    "ttft_s",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "mode",
    "forwards",
]


def _pairs(text: str) -> list[tuple[str, Any]]:
    """name=JSON name=JSON ..."""
    decoder, pairs, at = json.JSONDecoder(), [], 0
    while at < len(text):
        name, _, _ = text[at:].partition("=")
        value, end = decoder.raw_decode(text, at + len(name) + 1)
        pairs.append((name, value))
        at = end + 1
    return pairs


def ask(backend: ScriptedBackend, fields: dict[str, Any], headers: dict[str, str] = HEADERS, **options: Any) -> Any:
    return with_client(
        backend, lambda client: client.post("/v1/completions", json=fields, headers=headers), keys=KEYS, **options
    )


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_leaves_one_line_with_its_figures(
    caplog: pytest.LogCaptureFixture, log_format: str, stream: bool
) -> None:
    fields = {**PROMPT, "stream": stream, "user": "ann"}
    ask(ScriptedBackend(GOOD), fields, {**HEADERS, "x-request-id": "mine-1"}, log_format=log_format)
    (line,) = lines_of(caplog)
    assert list(line) == FIELDS
    assert line["id"].startswith("cmpl-") and line["client_request_id"] == "mine-1"
    assert (line["endpoint"], line["model"], line["stream"], line["user"]) == ("completion", "tiny", stream, "ann")
    assert (line["status"], line["outcome"], line["error"]) == (200, "stop", None)
    assert (line["prompt_tokens"], line["completion_tokens"], line["mode"]) == (2, 3, "diffusion")
    assert line["forwards"] == {"prefill": 1, "denoise": 2, "commit": 1}
    assert 0 <= line["ttft_s"] <= line["seconds"]
    assert line["key"] == KEYS[0][:12]


def test_the_line_has_the_answer_s_own_id(caplog: pytest.LogCaptureFixture) -> None:
    response = ask(ScriptedBackend(GOOD), PROMPT)
    assert lines_of(caplog)[0]["id"] == response.json()["id"]


@pytest.mark.parametrize(
    ("script", "fields", "headers", "expected"),
    [
        (GOOD, {**PROMPT, "n": 0}, HEADERS, (400, "refused", "bad_request")),
        (GOOD, {**PROMPT, "model": NONCE}, HEADERS, (404, "refused", "not_found")),
        (GOOD, PROMPT, {"Authorization": f"Bearer {KEY}x"}, (401, "refused", "unauthorized")),
        (GOOD, {**PROMPT, "prompt": "a" * 2000}, HEADERS, (413, "refused", "too_large")),
        ([UserError(f"Too long: {NONCE}")], PROMPT, HEADERS, (400, "refused", "bad_request")),
        ([Failed("x", "It broke.")], PROMPT, HEADERS, (500, "failed", "engine")),
        ([JobError("It broke.")], PROMPT, HEADERS, (500, "failed", "engine")),
        ([ZeroDivisionError(NONCE)], PROMPT, HEADERS, (500, "failed", "internal")),
        (
            [Delta("x", (5,), NONCE), Failed("x", "It broke.")],
            {**PROMPT, "stream": True},
            HEADERS,
            (200, "failed", "engine"),
        ),
        (
            [Delta("x", (5,), NONCE), JobError("It broke.")],
            {**PROMPT, "stream": True},
            HEADERS,
            (200, "failed", "engine"),
        ),
    ],
)
def test_every_failure_leaves_one_line_that_names_its_kind(
    caplog: pytest.LogCaptureFixture,
    script: list[Any],
    fields: dict[str, Any],
    headers: dict[str, str],
    expected: tuple[int, str, str],
) -> None:
    ask(ScriptedBackend(script), fields, headers)
    (line,) = lines_of(caplog)
    assert (line["status"], line["outcome"], line["error"]) == expected
    assert line["error_message"] == ("It broke." if expected[2] == "engine" else None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_is_told_as_that(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    backend = ScriptedBackend([GOOD[0], "wait"])

    async def leave(client: httpx.AsyncClient) -> None:
        fields = {**PROMPT, "stream": stream}
        task = asyncio.create_task(client.post("/v1/completions", json=fields, headers=HEADERS))
        while not backend.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)

    with_client(backend, leave, keys=KEYS)
    (line,) = lines_of(caplog)
    assert (line["outcome"], line["error"], line["completion_tokens"]) == ("left", None, None)
    assert line["status"] == (200 if stream else None)


def test_neither_prompts_nor_answers_nor_keys_are_in_any_line(caplog: pytest.LogCaptureFixture) -> None:
    answer = [Delta("x", (5,), NONCE), *GOOD]
    for stream in (False, True):
        ask(ScriptedBackend(answer), {**PROMPT, "prompt": NONCE, "stream": stream, "stop": f"{NONCE}!"})
    for bad in ({"prompt": [NONCE] * 2}, {NONCE: 1}, {"temperature": NONCE}, {"model": NONCE}, {"stop": [NONCE] * 9}):
        assert ask(ScriptedBackend(GOOD), {**PROMPT, **bad}).status_code in (400, 404)
    ask(ScriptedBackend(GOOD), PROMPT, {"Authorization": f"Bearer {KEY}wrong"})
    ask(ScriptedBackend(GOOD), PROMPT, {"Authorization": KEY})
    assert len(lines_of(caplog)) == 9
    for record in caplog.records:
        assert NONCE not in str(vars(record)) and "NONCEKEY" not in str(vars(record))


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("abc-123", "abc-123"),
        ("x" * 128, "x" * 128),
        ("x" * 129, None),
        ("", None),
        (None, None),
        ("tab\there", None),
        ("line\nforged", None),
        ("한글", None),
    ],
)
def test_a_client_s_id_is_kept_only_if_it_is_short_and_printable(header: str | None, kept: str | None) -> None:
    assert client_id(header) == kept


def test_what_an_engine_could_not_finish_has_an_error_line_with_the_request_s_id(
    caplog: pytest.LogCaptureFixture, sharp_backbone: Backbone
) -> None:
    observer = EngineObserver(Engine(sharp_backbone), model="tiny", tracing=TracingArgs())
    observer.hear(GOOD[0], None)
    observer.hear(Failed("cmpl-7", "The forward failed: out of memory"), None)
    (record,) = [record for record in caplog.records if record.name == "ray.serve.blockcast"]
    assert record.levelno == logging.ERROR and vars(record)["id"] == "cmpl-7"
    assert "out of memory" in record.getMessage()
    assert total(read(encode(merge([observer.told()]), "")[0].decode()), "blockcast_engine_failures_total") == 1


def test_the_engine_s_own_lines_reach_serve_s_log_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handle", lambda record: heard.append(record.getMessage()))
    for name in OURS:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    join_serve_log()
    join_serve_log()
    logging.getLogger("actors.engine.loop").warning("a forward failed")
    logging.getLogger("model.kernels.fused").warning("stays on PyTorch")
    assert heard == ["a forward failed", "stays on PyTorch"]
