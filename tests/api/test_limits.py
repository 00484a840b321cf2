"""Keys, slots, deadlines and slow bodies, through a gateway that has little of each; and a page of another origin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import KEYS, MODEL, ORIGIN, Guarded
from tests.api.successor import letters_after
from tests.api.test_crowds import Leaver
from tests.api.wire import Wire, error_of, post

pytestmark = pytest.mark.slow
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 5}
LONG: dict[str, Any] = {**PROMPT, "max_tokens": 480}
KEY = {"Authorization": f"Bearer {KEYS[0]}"}


@pytest.fixture
def http(guarded: Guarded) -> Iterator[httpx.Client]:
    """A client with a key; what the requests of a test held is free again after it."""
    url = guarded.server.url + guarded.path
    with httpx.Client(base_url=url, headers=KEY, timeout=60, trust_env=False) as client:
        yield client
    assert guarded.server.await_idle().pages_used == 0
    assert all_slots(guarded) == [200] * guarded.slots


def all_slots(guarded: Guarded) -> list[int]:
    """The answers to as many requests at once as there are slots."""
    keys = [KEYS[i // guarded.slots_of_a_key] for i in range(guarded.slots)]

    async def everyone() -> list[int]:
        return await asyncio.gather(*(outcome(guarded.client(key), PROMPT) for key in keys))

    return asyncio.run(everyone())


async def outcome(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> int:
    """The status of one request."""
    try:
        await client.completions.create(**fields)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def test_whoever_shows_a_key_is_served_and_nobody_else(http: httpx.Client, guarded: Guarded) -> None:
    with httpx.Client(base_url=guarded.server.url + guarded.path, timeout=60, trust_env=False) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}, {"X-Api-Key": KEYS[0]}):
            for method, path in (
                ("POST", "/v1/chat/completions"),
                ("POST", "/v1/completions"),
                ("POST", "/tokenize"),
                ("GET", "/v1/models"),
                ("GET", f"/v1/models/{MODEL}"),
            ):
                refused = stranger.request(method, path, headers=headers)
                assert error_of(refused, 401)["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/openapi.json"):
            assert stranger.get(path).status_code == 200
    for key in KEYS:
        answer = http.post("/v1/completions", json=PROMPT, headers={"Authorization": f"bearer {key}"})
        assert answer.json()["choices"][0]["text"] == letters_after("a", 5)


def test_a_key_has_no_more_requests_open_than_its_share_and_other_keys_go_on(
    http: httpx.Client, guarded: Guarded
) -> None:
    mine, other = guarded.client(KEYS[0]), guarded.client(KEYS[1])

    async def main() -> tuple[openai.RateLimitError, int, int]:
        open_streams = [await mine.completions.create(**LONG, stream=True) for _ in range(guarded.slots_of_a_key)]
        with pytest.raises(openai.RateLimitError) as refused:
            await mine.completions.create(**PROMPT)
        beside = await outcome(other, PROMPT)
        await open_streams[0].close()
        while (again := await outcome(mine, PROMPT)) == 429:
            await asyncio.sleep(0.02)
        for stream in open_streams[1:]:
            await stream.close()
        return refused.value, beside, again

    refused, beside, again = asyncio.run(main())
    assert "API key" in refused.message and refused.code == "rate_limit_exceeded"
    assert int(refused.response.headers["retry-after"]) >= 1
    assert (beside, again) == (200, 200)


def test_more_requests_than_the_queue_holds_are_told_to_come_back(http: httpx.Client, guarded: Guarded) -> None:
    async def everyone() -> list[int]:
        return await asyncio.gather(*(outcome(guarded.client(key), {**LONG, "max_tokens": 200}) for key in KEYS * 4))

    codes = asyncio.run(everyone())
    assert codes.count(200) == guarded.slots and codes.count(429) == len(codes) - guarded.slots


def test_who_leaves_at_any_moment_gives_the_slot_back(http: httpx.Client, guarded: Guarded) -> None:
    async def everyone() -> None:
        for first in range(0, 60, 6):
            headers = {"Authorization": f"Bearer {KEYS[first % 3]}"}
            leavers = (Leaver(i) for i in range(first, first + 6))
            await asyncio.gather(*(leaver.run(guarded.server.port, guarded.path, headers) for leaver in leavers))

    asyncio.run(everyone())  # the fixture asks for all slots


def test_a_body_that_trickles_holds_no_slot_and_ends_with_a_408(http: httpx.Client, guarded: Guarded) -> None:
    port = guarded.server.port
    whole = post(f"{guarded.path}/v1/completions", port, PROMPT, **KEY)
    slow = [Wire(port) for _ in range(guarded.slots * 3)]
    for wire in slow:
        wire.send(whole[:-10])
    for drop in range(4):
        for wire in slow[drop::4]:
            wire.send(whole[-10 + drop : -9 + drop])
        assert all_slots(guarded) == [200] * guarded.slots
    for wire in slow:
        with wire:
            assert error_of(wire.reply(), 408)["code"] == "request_timeout"


def test_a_body_over_the_limit_is_a_413_by_its_length_and_in_chunks(http: httpx.Client, guarded: Guarded) -> None:
    large = json.dumps({**PROMPT, "user": "u" * guarded.max_body_bytes}).encode()
    headers = {"Content-Type": "application/json"}
    error_of(http.post("/v1/completions", content=large, headers=headers), 413)
    pieces = (large[i : i + 5000] for i in range(0, len(large), 5000))
    error_of(http.post("/v1/completions", content=pieces, headers=headers), 413)
    fitting = large[: -100 - (len(large) - guarded.max_body_bytes)] + b'"}'
    assert http.post("/v1/completions", content=fitting, headers=headers).status_code == 200


def test_an_answer_past_its_deadline_is_a_504_and_its_work_is_freed(http: httpx.Client, guarded: Guarded) -> None:
    before = guarded.server.stats().committed_tokens
    late = http.post("/v1/completions", json=LONG, headers={"X-Deadline-S": "0.02"})
    assert error_of(late, 504)["code"] == "deadline_exceeded"
    after = guarded.server.await_idle()
    assert after.committed_tokens - before < 400
    in_time = http.post("/v1/completions", json=PROMPT, headers={"X-Deadline-S": "60"})
    assert in_time.json()["choices"][0]["text"] == letters_after("a", 5)


def test_a_stream_past_its_deadline_ends_with_an_error_and_no_done(http: httpx.Client) -> None:
    text = http.post("/v1/completions", json={**LONG, "stream": True}, headers={"X-Deadline-S": "0.2"}).text
    *deltas, last = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert last["error"]["code"] == "deadline_exceeded" and "[DONE]" not in text
    said = "".join(delta["choices"][0]["text"] for delta in deltas)
    assert said and letters_after("a", 480).startswith(said)


def test_a_deadline_that_is_none_is_a_400_by_name(http: httpx.Client) -> None:
    for seconds in ("0", "-1", "nan", "inf", "1e9", "soon", ""):
        error = error_of(http.post("/v1/completions", json=PROMPT, headers={"X-Deadline-S": seconds}), 400)
        assert error["param"] == "X-Deadline-S"


def test_pages_of_a_named_origin_may_ask_and_no_others(http: httpx.Client) -> None:
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = http.options("/v1/completions", headers={"Origin": ORIGIN, **wish})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    for fields, status in ((PROMPT, 200), ({}, 400)):
        answer = http.post("/v1/completions", json=fields, headers={"Origin": ORIGIN})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == ORIGIN
    for origin in ("https://app.example.org", "http://app.example", "null"):
        refused = http.options("/v1/completions", headers={"Origin": origin, **wish})
        answer = http.post("/v1/completions", json=PROMPT, headers={"Origin": origin})
        assert "access-control-allow-origin" not in refused.headers
        assert "access-control-allow-origin" not in answer.headers


def test_tokenize_says_what_a_request_is_read_as(http: httpx.Client) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "안녕 🎉"}),
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "안녕 🎉"}]}),
    ):
        told = http.post("/tokenize", json={"model": MODEL, **fields}).json()
        assert set(told) == {"tokens", "count", "max_model_len"} and told["count"] == len(told["tokens"])
        answer = http.post(path, json={"model": MODEL, "max_tokens": 1, **fields}).json()
        assert answer["usage"]["prompt_tokens"] == told["count"]
        same = {"model": MODEL, "max_tokens": 1, "prompt": told["tokens"]}
        again = http.post("/v1/completions", json=same).json()["choices"][0]
        assert again["text"] == (answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"])
    for fields in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": "a", "x": 1}):
        error_of(http.post("/tokenize", json={"model": MODEL, **fields}), 400)
    assert error_of(http.post("/tokenize", json={"model": "other", "prompt": "a"}), 404)["param"] == "model"
