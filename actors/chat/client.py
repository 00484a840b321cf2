"""The wire: a server's models, and an answer as a stream of events, with the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from actors.gateway.access import is_loopback
from model.errors import JobError, UserError

SILENCE_S = 600.0  # a server that says nothing for so long is given up
DONE = "[DONE]"


class Refused(JobError):
    """The server answered with an error, in its own words. status: of HTTP, 500 for one inside a stream."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Event:
    """One server-sent event. name: "canvas", or "" for a chunk as OpenAI has it."""

    name: str
    data: dict[str, Any]


class Client:
    """One server. url: of its API, as the openai client takes it (`http://127.0.0.1:8000/v1`)."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Raises UserError for what is no URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url {url!r} is no web address: give one like http://127.0.0.1:8000/v1.")
        self.url = url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"
        self._key = key
        # A proxy that the environment names stands between this machine and others, never before itself.
        direct = [urllib.request.ProxyHandler({})] if is_loopback(parts.hostname) else []
        self._opener = urllib.request.build_opener(*direct)

    def models(self) -> list[dict[str, Any]]:
        """What `GET /v1/models` lists. Raises JobError."""
        with self._open("models", None) as response:
            try:
                listed: list[dict[str, Any]] = json.load(response)["data"]
            except (ValueError, KeyError, TypeError) as error:
                raise JobError(f"{self.url} does not speak OpenAI's protocol: check --url.") from error
        if not listed:
            raise JobError(f"{self.url} serves no model.")
        return listed

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Event]:
        """The events of an answer up to its end; leaving early ends the request. Raises JobError."""
        with self._open(path, body) as response:
            name = ""
            try:
                for raw in response:
                    field, _, value = raw.decode().rstrip("\r\n").partition(":")
                    value = value.removeprefix(" ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        if value == DONE:
                            return
                        yield _event(name, value)
                        name = ""
            except (OSError, HTTPException, ValueError) as error:
                raise JobError(f"The connection to {self.url} broke: send it again.") from error
        raise JobError("The server ended the answer too early: send it again.")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers)
        try:
            return self._opener.open(request, timeout=SILENCE_S)
        except urllib.error.HTTPError as error:
            raise _refused(error) from error
        except (OSError, HTTPException, ValueError) as error:
            raise JobError(f"Nothing answers at {self.url}: is the server running, and is --url right?") from error


def _event(name: str, value: str) -> Event:
    data = json.loads(value)
    if "error" in data:
        raise Refused(data["error"]["message"], 500)
    return Event(name, data)


def _refused(error: urllib.error.HTTPError) -> Refused:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        message = f"The server answered with status {error.code}: check --url."
    return Refused(message, error.code)
