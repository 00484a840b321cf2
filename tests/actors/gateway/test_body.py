"""Bodies within bounds of size, time and memory, over real sockets' worth of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import Request

from actors.gateway.body import BODIES_AT_ONCE, BodyReader, parse_object
from actors.protocol.fields import RequestError

HEADERS = [(b"content-type", b"application/json")]


def request(chunks: list[bytes], pause_s: float = 0.0) -> Request:
    async def messages() -> AsyncIterator[dict[str, Any]]:
        for chunk in chunks:
            await asyncio.sleep(pause_s)
            yield {"type": "http.request", "body": chunk, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    stream = messages()
    return Request({"type": "http", "headers": HEADERS, "method": "POST"}, lambda: anext(stream))


def status_of(reader: BodyReader, http: Request) -> int:
    with pytest.raises(RequestError) as caught:
        asyncio.run(reader.fields(http))
    return caught.value.status


def test_a_body_in_pieces_is_one_body() -> None:
    reader = BodyReader(100, 5)
    assert asyncio.run(reader.fields(request([b'{"a"', b": 1}"]))) == {"a": 1}
    assert reader._held == 0


def test_a_body_that_trickles_ends_with_a_408_and_holds_nothing() -> None:
    reader = BodyReader(100, 0.05)
    assert status_of(reader, request([b"{"] * 10, pause_s=0.02)) == 408
    assert reader._held == 0


def test_a_body_that_is_too_large_ends_with_a_413_before_it_is_all_here() -> None:
    reader = BodyReader(10, 5)
    assert status_of(reader, request([b"x" * 6] * 1000)) == 413
    assert reader._held == 0


@pytest.mark.parametrize(
    ("body", "param"), [(b'{"a": 1, "b": 2, "a": 1}', "a"), (b'{"a": {"b": [{"c": 1, "c": 2}]}}', "c")]
)
def test_a_key_that_is_given_twice_is_refused_by_name(body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.param == param


def test_many_large_bodies_share_one_budget() -> None:
    reader = BodyReader(10, 5)
    reader._held = BODIES_AT_ONCE * 10 - 3
    assert status_of(reader, request([b"{}  "])) == 503
    reader._held = BODIES_AT_ONCE * 10 - 4
    assert asyncio.run(reader.fields(request([b"{}  "]))) == {}
