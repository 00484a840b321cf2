"""One request over HTTP, and what became of it, judged against the answer that it must have.

An answer is right, or wrong; an error is proper in OpenAI's shape, as a status or, once a stream has begun, as its
last event with no [DONE] behind it. A connection that breaks is told apart from what is worse: a body that ends too
soon without a word, one in no known shape, or nothing at all until the client's patience ends.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

ERROR_KEYS = {"message", "type", "param", "code"}
ERROR_STATUSES = (429, 500, 503, 504)  # what a request that is in order may be told
PROXY_LOST_GATEWAY = (500, "Internal Server Error")  # what Serve's proxy says when the gateway left it without a word
DETAIL = 300  # characters of a body in a detail


class Outcome(StrEnum):
    """RIGHT; ERROR: a proper one; WRONG: another answer; CUT: the connection broke; LOST: anything else."""

    RIGHT = "right"
    ERROR = "error"
    WRONG = "wrong"
    CUT = "cut"
    LOST = "lost"


@dataclass(frozen=True)
class Answer:
    """What one request must get, streamed or not. tokens: completion tokens by `usage`."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Target:
    """A server. key: its API key; patience_s: how long a request may take; fresh: a new connection for each request,
    so that one which the server closed between two requests is no failure.
    """

    url: str
    key: str | None = None
    patience_s: float = 60.0
    fresh: bool = False

    def session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connector = aiohttp.TCPConnector(limit=0, force_close=self.fresh)
        timeout = aiohttp.ClientTimeout(total=None)  # `ask` has its own
        return aiohttp.ClientSession(self.url, headers=headers, connector=connector, timeout=timeout)


@dataclass
class Record:
    """One request, complete when it has ended. Times are of time.monotonic(); first: when the first text was there,
    None where none came.
    """

    stream: bool
    begun: float = field(default_factory=time.monotonic)
    first: float | None = None
    ended: float = 0.0
    outcome: Outcome = Outcome.LOST
    answer: Answer | None = None
    detail: str = ""

    def end(self, outcome: Outcome, detail: str = "") -> Record:
        self.ended, self.outcome, self.detail = time.monotonic(), outcome, detail
        return self


@dataclass
class Stream:
    """What has been read of a stream of server-sent events."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    error: Any = None
    done: bool = False
    trailing: bool = False  # something came behind the end
    names: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None

    def take(self, line: str) -> bool:
        """Read one line; whether it brought text."""
        if line.startswith("event: "):
            self.names.append(line.removeprefix("event: "))
        if not line.startswith("data: "):
            return False
        self.trailing = self.trailing or self.ended
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return False
        if self.names:  # an event with a name is not OpenAI's
            self.names.clear()
            return False
        return self._take_chunk(json.loads(data))

    def _take_chunk(self, chunk: dict[str, Any]) -> bool:
        if "error" in chunk:
            self.error = chunk
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        if not chunk.get("choices"):
            return False
        choice = chunk["choices"][0]
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.text += text or ""
        return bool(text)


async def ask(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    fields: Mapping[str, Any],
    expected: Answer | None,
    record: Record,
) -> Record:
    """Send one request, streamed or not as the record says, and write into it what came of it.

    expected None: any whole answer is right.
    """
    stream = record.stream
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}} if stream else dict(fields)
    seen = Stream()
    try:
        async with asyncio.timeout(target.patience_s), session.post(path, json=body) as response:
            if response.status != 200:
                return _judge_refusal(record, response.status, await response.text())
            if not stream:
                return _judge(record, _whole(json.loads(await response.text())), expected)
            async for line in _lines(response):
                if seen.take(line) and record.first is None:
                    record.first = time.monotonic()
            return _judge_stream(record, seen, expected)
    except TimeoutError:
        return record.end(Outcome.LOST, f"nothing more in {target.patience_s:g} s, after {seen.text[:DETAIL]!r}")
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        if expected is not None and not expected.text.startswith(seen.text):
            return _wrong(record, seen.text, expected)
        return record.end(Outcome.CUT, f"{type(error).__name__}: {error}")
    except (ValueError, KeyError, TypeError, aiohttp.ClientError) as error:
        return record.end(Outcome.LOST, f"a body in no known shape ({type(error).__name__}: {error})")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        yield line.decode("utf-8").rstrip("\n")


def _whole(body: dict[str, Any]) -> Answer:
    """The answer in the JSON of a request that did not stream."""
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, choice["finish_reason"], body["usage"]["completion_tokens"])


def _judge(record: Record, answer: Answer, expected: Answer | None) -> Record:
    if expected is not None and answer != expected:
        return _wrong(record, answer, expected)
    record.answer = answer
    record.end(Outcome.RIGHT)
    record.first = record.first or record.ended
    return record


def _judge_refusal(record: Record, status: int, body: str) -> Record:
    if (status, body) == PROXY_LOST_GATEWAY:
        return record.end(Outcome.CUT, "the gateway left Serve's proxy without an answer")
    try:
        error = json.loads(body)
    except ValueError:
        error = None
    if status in ERROR_STATUSES and is_error(error):
        return record.end(Outcome.ERROR, f"{status}: {error['error']['message']}")
    return record.end(Outcome.LOST, f"status {status} with {body[:DETAIL]!r}")


def _judge_stream(record: Record, seen: Stream, expected: Answer | None) -> Record:
    if expected is not None and not expected.text.startswith(seen.text):
        return _wrong(record, seen.text, expected)
    if seen.trailing:
        return record.end(Outcome.LOST, "something came behind the stream's end")
    if seen.error is not None:
        if is_error(seen.error):
            return record.end(Outcome.ERROR, f"event: {seen.error['error']['message']}")
        return record.end(Outcome.LOST, f"an error in no known shape: {str(seen.error)[:DETAIL]}")
    if not seen.done or seen.finish_reason is None or seen.tokens is None:
        return record.end(Outcome.LOST, f"the stream ended without [DONE] or an error, after {seen.text[:DETAIL]!r}")
    return _judge(record, Answer(seen.text, seen.finish_reason, seen.tokens), expected)


def _wrong(record: Record, got: object, expected: Answer) -> Record:
    return record.end(Outcome.WRONG, f"got {str(got)[:DETAIL]!r}, not {str(expected)[:DETAIL]!r}")


def is_error(body: Any) -> bool:
    """Whether this is exactly OpenAI's error object, with a message."""
    if not isinstance(body, dict) or set(body) != {"error"} or not isinstance(body["error"], dict):
        return False
    return set(body["error"]) == ERROR_KEYS and bool(body["error"]["message"])
