"""Many clients at a time: each gets the answer to its own question, and those who leave take nothing with them."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.api.conftest import MODEL, Server
from tests.api.successor import LETTERS, letters_after
from tests.api.wire import head, post

pytestmark = pytest.mark.slow
CROWD = 200


@dataclass(frozen=True)
class Question:
    """One of `CROWD` questions with an answer that no other has."""

    number: int

    @property
    def letter(self) -> str:
        return LETTERS[self.number % len(LETTERS)]

    @property
    def tokens(self) -> int:
        return 5 + 7 * (self.number // len(LETTERS))

    @property
    def answer(self) -> str:
        return letters_after(self.letter, self.tokens)

    @property
    def fields(self) -> dict[str, Any]:
        """A prompt that ends with the letter, or a chat whose last message is to be continued after it."""
        nonce = f"nonce {self.number} "
        common = {"model": MODEL, "max_tokens": self.tokens, "stream": bool(self.number // 2 % 2)}
        if self.number % 2:
            return {**common, "prompt": nonce + self.letter}
        begun = {"role": "assistant", "content": f"so {self.letter}"}
        return {**common, "messages": [{"role": "user", "content": nonce}, begun]}


async def ask(client: openai.AsyncOpenAI, question: Question) -> str:
    fields = question.fields
    create: Any = client.completions.create if "prompt" in fields else client.chat.completions.create
    answer = await create(**fields)
    if not fields["stream"]:
        choice = answer.choices[0]
        assert answer.usage.completion_tokens == question.tokens
        return str(choice.text if "prompt" in fields else choice.message.content)
    choices = [chunk.choices[0] async for chunk in answer]
    return "".join((c.text if "prompt" in fields else c.delta.content) or "" for c in choices)


def test_two_hundred_at_once_each_get_the_answer_to_their_own_question(
    async_client: openai.AsyncOpenAI, server: Server
) -> None:
    questions = [Question(i) for i in range(CROWD)]
    assert len({q.answer for q in questions}) == CROWD

    async def everyone() -> list[str]:
        return await asyncio.gather(*(ask(async_client, question) for question in questions))

    assert asyncio.run(everyone()) == [question.answer for question in questions]
    assert server.await_idle().pages_used == 0


class Leaver:
    """A client that goes away at a moment drawn by its number: in the body, before the first byte, or while reading."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.way = draw.choice(("half a body", "at once", "soon", "streaming", "streaming"))
        self.streams = self.way == "streaming" or draw.random() < 0.5
        self.resets = draw.random() < 0.5
        self.waits_s = draw.uniform(0, 0.15)
        self.reads = draw.randint(1, 6)
        self.tokens = draw.choice((40, 200, 400))

    async def run(self, port: int, prefix: str = "", headers: Mapping[str, str] | None = None) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = {"model": MODEL, "prompt": "a", "max_tokens": self.tokens, "stream": self.streams}
        request = post(f"{prefix}/v1/completions", port, fields, **(headers or {}))
        writer.write(request[: -len(request) // 8] if self.way == "half a body" else request)
        await writer.drain()
        if self.way == "streaming":
            for _ in range(self.reads):
                await reader.readline()
        elif self.way != "at once":
            await asyncio.sleep(self.waits_s)
        if self.resets:
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def test_two_hundred_who_leave_at_random_moments_leave_no_page_and_disturb_nobody(
    async_client: openai.AsyncOpenAI, server: Server
) -> None:
    leavers = [Leaver(i) for i in range(CROWD)]
    assert {leaver.way for leaver in leavers} == {"half a body", "at once", "soon", "streaming"}
    questions = [Question(i) for i in range(0, CROWD, 10)]
    before = server.stats().committed_tokens

    async def everyone() -> list[str]:
        at_once = asyncio.Semaphore(20)

        async def leave(leaver: Leaver) -> None:
            async with at_once:
                await leaver.run(server.port)

        leaving = asyncio.gather(*(leave(leaver) for leaver in leavers))
        answers = await asyncio.gather(*(ask(async_client, question) for question in questions))
        await leaving
        return answers

    assert asyncio.run(everyone()) == [question.answer for question in questions]
    after = server.await_idle()
    assert after.pages_used == 0
    asked = sum(leaver.tokens for leaver in leavers if leaver.way != "half a body")
    assert after.committed_tokens - before < asked / 2, "rows of clients that left were decoded on"


def test_a_client_that_stops_sending_but_still_listens_is_no_leak(server: Server) -> None:
    async def half_open() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post("/v1/completions", server.port, {"model": MODEL, "prompt": "a", "max_tokens": 400}))
        writer.write_eof()
        return await reader.read()

    async def everyone() -> list[bytes]:
        return await asyncio.gather(*(half_open() for _ in range(8)))

    answers = asyncio.run(everyone())
    assert all(answer == b"" or answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert server.await_idle().pages_used == 0


def test_a_connection_that_sends_nothing_or_half_a_head_holds_no_slot(client: openai.OpenAI, server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    for connection in idle[::2]:
        connection.sendall(head("POST", "/v1/completions", server.port, Content_Length=100)[:-4])
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=5)
    assert answer.choices[0].text == letters_after("a", 5)
    for connection in idle:
        connection.close()
