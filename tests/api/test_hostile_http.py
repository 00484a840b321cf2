"""What attackers and broken clients send: each gets OpenAI's error shape or a closed connection; nothing is held."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, Server
from tests.api.successor import letters_after
from tests.api.wire import Wire, error_of, head, post

pytestmark = pytest.mark.slow
JSON = {"Content-Type": "application/json"}
JSON_CHUNKED = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 5}
TO_US = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HUGE = "9" * 4000  # below Python's own limit on digits


@pytest.fixture(scope="module")
def http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


@pytest.fixture(autouse=True)
def still_answers(http: httpx.Client) -> Any:
    """Whatever a test sent: the next client is served, and nothing is left running."""
    yield
    answer = http.post("/v1/completions", json=PROMPT)
    assert answer.json()["choices"][0]["text"] == letters_after("a", 5)


def send(http: httpx.Client, body: bytes | str, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else body.encode()
    return http.post(path, content=content, headers={**JSON, **headers})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (f'{{"model": "{MODEL}", "prompt": "a", "prompt": "b"}}', "prompt"),
        (f'{{"model": "x", "model": "{MODEL}", "prompt": "b"}}', "model"),
        (f'{{"model": "{MODEL}", "prompt": "a", "diffusion": {{"steps": 1, "steps": 2}}}}', "steps"),
        (f'{{"model": "{MODEL}", "prompt": "a", "temperature": NaN}}', None),
        (f'{{"model": "{MODEL}", "prompt": "a", "temperature": -Infinity}}', None),
        (f'{{"model": "{MODEL}", "prompt": "a", "temperature": 1e400}}', "temperature"),
        (f'{{"model": "{MODEL}", "prompt": "a", "temperature": {HUGE}}}', "temperature"),
        (f'{{"model": "{MODEL}", "prompt": "a", "top_p": -{HUGE}}}', "top_p"),
        (f'{{"model": "{MODEL}", "prompt": "a", "max_tokens": {HUGE}}}', "max_tokens"),
        (f'{{"model": "{MODEL}", "prompt": "a", "max_tokens": 1e300}}', "max_tokens"),
        (f'{{"model": "{MODEL}", "prompt": "a", "seed": {HUGE}}}', "seed"),
        (f'{{"model": "{MODEL}", "prompt": "a", "top_k": {2**64}, "n": {HUGE}}}', "n"),
        (f'{{"model": "{MODEL}", "prompt": [{HUGE}]}}', "prompt"),
        (f'{{"model": "{MODEL}", "prompt": [{2**70}]}}', "prompt"),
        (f'{{"model": "{MODEL}", "prompt": "a", "logit_bias": {{"5": {HUGE}}}}}', "logit_bias"),
        (f'{{"model": "{MODEL}", "prompt": "a", "logit_bias": {{"{HUGE}": 1}}}}', "logit_bias"),
        (f'{{"model": "{MODEL}", "prompt": "a", "logit_bias": {{"{"9" * 5000}": 1}}}}', "logit_bias"),
        (f'{{"model": "{MODEL}", "prompt": "a", "diffusion": {{"threshold": {HUGE}}}}}', "diffusion.threshold"),
        (f'{{"model": "{MODEL}", "prompt": "\\ud83d"}}', "prompt"),
        (f'{{"model": "{MODEL}", "prompt": "a", "stop": "\\udc00"}}', "stop"),
        (f'{{"model": "{MODEL}", "prompt": "a", "user": "\\ud800\\ud800"}}', "user"),
        (f'{{"model": "{MODEL}", "prompt": "a", "\\ud800": 1}}', "\\ud800"),
        (f'{{"model": "{MODEL}", "prompt": "a", "\\u0000": 1}}', "\x00"),
        (f'{{"model": "{MODEL}", "prompt": "a\x00"}}', None),
        (f'{{"model": "{MODEL}", "prompt": "a"}}}}', None),
        (f'{{"model": "{MODEL}", "prompt": "a",}}', None),
        (f'{{"model": "{MODEL}", "prompt": "a"}} {{}}', None),
        (f"{{'model': '{MODEL}', 'prompt': 'a'}}", None),
    ],
)
def test_numbers_keys_and_characters_that_are_no_request_are_a_400(
    http: httpx.Client, body: str, param: str | None
) -> None:
    error = error_of(send(http, body), 400)
    assert error["param"] == param
    assert len(error["message"]) < 600


@pytest.mark.parametrize(
    "model", ["other", "", "\x00", MODEL + "\x00", MODEL.upper(), " " + MODEL, "\ud800", "x" * 10**6]
)
def test_any_other_model_is_a_404_in_few_words(http: httpx.Client, model: str) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": []})):
        error = error_of(send(http, json.dumps({"model": model, **prompt}), path), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found") and len(error["message"]) < 600


@pytest.mark.parametrize(
    "deep",
    [
        '{"model":"x","prompt":' + "[" * 10_000 + "]" * 10_000 + "}",
        '{"model":"x","prompt":"a","diffusion":' + '{"a":' * 10_000 + "1" + "}" * 10_000 + "}",
        "[" * 5_000_000,
        '{"a":' * 1_000_000,
    ],
    ids=["array", "object", "open arrays", "open objects"],
)
def test_a_body_however_deep_is_a_400(http: httpx.Client, deep: str) -> None:
    error_of(send(http, deep.replace('"x"', f'"{MODEL}"')), 400)


def test_a_megabyte_in_any_field_is_a_400_by_name(http: httpx.Client) -> None:
    million = 10**6
    message = {"role": "user", "content": "가" * (million // 3)}
    chat = {"model": MODEL, "messages": [message]}
    error = error_of(http.post("/v1/chat/completions", json=chat), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    many = {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 20_000}
    assert error_of(http.post("/v1/chat/completions", json=many), 400)["code"] == "context_length_exceeded"
    for fields, param in (
        ({"prompt": [5] * 300_000}, "prompt"),
        ({"prompt": "a", "stop": ["x" * million] * 5}, "stop"),
        ({"prompt": "a", "z" * million: 1}, None),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    ):
        error = error_of(http.post("/v1/completions", json={"model": MODEL, **fields}), 400)
        assert (error["param"] == param) if param else (len(error["param"]) < 600)
        assert len(error["message"]) < 1000


def test_a_megabyte_of_stop_strings_or_user_is_honoured(http: httpx.Client) -> None:
    fields = {**PROMPT, "stop": ["bcdef" + "x" * 10**6, "de"], "user": "u" * 10**6}
    assert http.post("/v1/completions", json=fields).json()["choices"][0]["text"] == "bc"


@pytest.mark.parametrize(
    "content_type",
    ["text/json", "application/jsonl", "multipart/form-data; boundary=x", "application/json-patch+json", "*/*", ";"],
)
def test_a_wrong_content_type_is_a_415(http: httpx.Client, content_type: str) -> None:
    body = json.dumps(PROMPT).encode()
    error_of(http.post("/v1/completions", content=body, headers={"Content-Type": content_type}), 415)


def test_a_compressed_body_is_a_415_and_a_compressed_answer_is_not_forced_on_anyone(http: httpx.Client) -> None:
    packed = gzip.compress(json.dumps(PROMPT).encode())
    error_of(send(http, packed, **{"Content-Encoding": "gzip"}), 415)
    for wish in ("gzip, br", "identity;q=0, *;q=0", "nonsense"):
        response = send(http, json.dumps(PROMPT), **{"Accept-Encoding": wish, "Accept": "text/html"})
        assert response.status_code == 200 and "content-encoding" not in response.headers


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat", "/v2/models", "/v1/embeddings", "/docs", "/%2e%2e/etc"])
def test_an_unknown_route_is_a_404_in_openai_s_shape(http: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        error_of(http.request(method, path), 404)


def test_a_known_route_by_another_method_is_a_405_that_says_which(http: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
            response = http.request(method, path)
            error_of(response, 405)
            assert response.headers["allow"] == "POST"
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/openapi.json"):
        refused = http.post(path)
        error_of(refused, 405)
        assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
        answer = http.head(path)
        assert answer.status_code == 200 and answer.content == b""
        assert answer.headers["content-length"] == http.get(path).headers["content-length"]
    nothing = http.head("/v1/nothing")
    assert nothing.status_code == 404 and nothing.content == b""


def test_a_last_slash_is_another_route_and_redirects_nobody(http: httpx.Client) -> None:
    for path in ("/v1/completions/", "/v1/chat/completions/"):
        error_of(http.post(path, json=PROMPT, headers={"Host": "attacker.example"}), 404)


def test_without_a_setting_no_other_origin_is_told_that_it_may_ask(http: httpx.Client) -> None:
    origin = {"Origin": "http://localhost:3000"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answers = [
        http.options("/v1/completions", headers=preflight),
        http.post("/v1/completions", json=PROMPT, headers=origin),
        http.post("/v1/completions", json={}, headers=origin),
        http.get("/v1/models", headers=origin),
        http.get("/v1/nothing", headers=origin),
    ]
    assert [answer.status_code for answer in answers] == [405, 200, 400, 200, 404]
    assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]


def test_a_body_without_a_length_is_read_in_chunks_up_to_the_limit(http: httpx.Client, server: Server) -> None:
    body = json.dumps(PROMPT).encode()
    answer = http.post("/v1/completions", content=(bytes([b]) for b in body), headers=JSON)
    assert answer.json()["choices"][0]["text"] == letters_after("a", 5)
    megabyte = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with Wire(server.port) as wire:
        wire.send(head("POST", "/v1/completions", server.port, **JSON_CHUNKED))
        sent = 0
        try:
            while sent < 64:
                wire.send(megabyte)
                sent += 1
        except OSError:
            pass  # it does not listen any more
        error_of(wire.reply(), 413)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\x00" * 100,
        b"BREW /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        TO_US + b"Content-Length: -5\r\n\r\n",
        TO_US + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\nabcde",
        TO_US + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        TO_US + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-Flood: " + b"x" * 2**20 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        + b"".join(b"X-%d: y\r\n" % i for i in range(50_000))
        + b"\r\n",
        b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: 127.0.0.1\r\n\r\n",
    ],
)
def test_what_is_hardly_http_gets_an_end_and_no_200(server: Server, request_bytes: bytes) -> None:
    with Wire(server.port) as wire:
        try:
            wire.send(request_bytes)
            wire.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        line = wire.rest().partition(b"\r\n")[0]
    assert line == b"" or line.split()[1] in (b"400", b"403", b"404", b"413", b"414", b"431"), line


@pytest.mark.parametrize("stream", [False, True])
def test_serve_s_own_timeout_ends_an_answer_with_our_error_and_frees_its_row(
    http: httpx.Client, server: Server, stream: bool
) -> None:
    before = server.stats().committed_tokens
    fields = {**PROMPT, "max_tokens": 480, "stream": stream}
    response = http.post("/v1/completions", json=fields, headers={"x-request-timeout-seconds": "0.3"})
    if stream:
        assert response.status_code == 200 and "[DONE]" not in response.text
        error = json.loads(response.text.strip().rsplit("data: ", 1)[1])["error"]
    else:
        error = error_of(response, 504)
    assert error["code"] == "deadline_exceeded" and "0.25 s" in error["message"]
    assert server.await_idle().committed_tokens - before < 480


def test_serve_s_own_headers_are_honoured_or_refused_by_name(http: httpx.Client) -> None:
    for name, value in (
        *(("x-request-timeout-seconds", value) for value in ("0", "-1", "nan", "inf", "soon")),
        ("x-request-disconnect-disabled", "?1"),
    ):
        for path, fields in (("/v1/completions", PROMPT), ("/tokenize", {"model": MODEL, "prompt": "a"})):
            assert error_of(http.post(path, json=fields, headers={name: value}), 400)["param"] == name
    patient = {"x-request-timeout-seconds": "60", "x-request-disconnect-disabled": "?0"}
    assert http.post("/v1/completions", json=PROMPT, headers=patient).status_code == 200


def test_a_method_that_http_knows_is_refused_in_openai_s_shape_and_any_other_by_serve_itself(
    http: httpx.Client, server: Server
) -> None:
    for method in ("PROPFIND", "PURGE", "LINK"):
        error_of(http.request(method, "/v1/completions"), 405)
        error_of(http.request(method, "/v1/nothing"), 404)
    with Wire(server.port) as wire:
        wire.send(b"BREW /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = wire.rest()
    assert answer.startswith(b"HTTP/1.1 400 ") and b"text/plain" in answer, "docs/http.md says so"


def test_two_requests_on_one_connection_get_two_answers_in_order(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(
            post("/v1/completions", server.port, {**PROMPT, "prompt": "x"}),
            post("/v1/completions", server.port, {**PROMPT, "stream": True}),
            head("GET", "/v1/nothing", server.port),
            post("/v1/completions", server.port, PROMPT),
        )
        first, second, third, fourth = (wire.reply() for _ in range(4))
    assert json.loads(first.text)["choices"][0]["text"] == letters_after("x", 5)
    assert second.text.endswith("data: [DONE]\n\n")
    error_of(third, 404)
    assert json.loads(fourth.text)["choices"][0]["text"] == letters_after("a", 5)


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(server: Server) -> None:
    body = json.dumps(PROMPT).encode()
    asked = {"Content_Type": "application/json", "Content_Length": len(body), "Expect": "100-continue"}
    with Wire(server.port) as wire:
        wire.send(head("POST", "/v1/completions", server.port, **asked))
        assert wire.reply_status() == 100
        wire.send(body)
        assert json.loads(wire.reply().text)["choices"][0]["text"] == letters_after("a", 5)
