"""Bodies and routes that no well-behaved client sends: each gets OpenAI's error shape, and the server goes on."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.api.conftest import MODEL, Server
from tests.api.successor import ANSWER
from tests.api.wire import error_of

pytestmark = pytest.mark.slow
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": NaN}',
        b"\xff\xfe",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"model":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"model": ' + b"9" * 10_000 + b"}",
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
        json.dumps({**CHAT, "model": 5}).encode(),
        json.dumps({"messages": CHAT["messages"]}).encode(),
    ],
)
def test_a_body_that_is_no_request_is_a_400(http: httpx.Client, body: bytes) -> None:
    error_of(http.post("/v1/chat/completions", content=body, headers=JSON), 400)


def test_a_wrong_content_type_is_a_415(http: httpx.Client) -> None:
    body = json.dumps(CHAT).encode()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": content_type}
        error_of(http.post("/v1/chat/completions", content=body, headers=headers), 415)
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert http.post("/v1/chat/completions", content=body, headers=charset).status_code == 200


def test_a_body_over_the_limit_is_a_413_and_a_long_prompt_a_400(http: httpx.Client) -> None:
    error_of(http.post("/v1/chat/completions", content=b" " * (17 * 2**20), headers=JSON), 413)
    prompt = {"model": MODEL, "prompt": "a" * 1_000_000}
    assert error_of(http.post("/v1/completions", json=prompt), 400)["code"] == "context_length_exceeded"


def test_unknown_routes_and_methods_are_errors_in_openais_shape(http: httpx.Client) -> None:
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get("/v1/chat/completions"), 405)


def test_health_and_readiness_are_told(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200


def test_a_foreign_host_header_is_refused_without_api_keys(http: httpx.Client) -> None:
    error_of(http.get("/v1/models", headers={"Host": "attacker.example"}), 403)


def test_the_server_still_answers_afterwards(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
