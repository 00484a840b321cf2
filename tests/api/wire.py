"""HTTP by hand, for what no client library would send; and the shape that every error must have."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx


def error_of(response: httpx.Response | Reply, status: int) -> dict[str, Any]:
    """The error object of an answer that must be an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


@dataclass(frozen=True)
class Reply:
    """An answer as it came over the wire; header names in lower case."""

    status_code: int
    headers: dict[str, str]
    text: str


class Wire:
    """One TCP connection to a server."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def reply(self) -> Reply:
        """The next answer: its end is told by Content-Length, by chunks, or by the server closing the connection."""
        status = int(self._file.readline().split()[1])
        lines = iter(self._file.readline, b"\r\n")
        headers = {
            k.strip().lower(): v.strip() for k, _, v in (line.decode("latin-1").partition(":") for line in lines)
        }
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        elif "content-length" in headers:
            body = self._file.read(int(headers["content-length"]))
        else:
            body = self._file.read()
        return Reply(status, headers, body.decode())

    def reply_status(self) -> int:
        """The status of an answer without a body."""
        line = self._file.readline()
        while self._file.readline() != b"\r\n":
            pass
        return int(line.split()[1])

    def events(self) -> Iterator[bytes]:
        """The data of an answer's server-sent events as they come."""
        for line in iter(self._file.readline, b""):
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()

    def _chunks(self) -> Iterable[bytes]:
        while size := int(self._file.readline(), 16):
            yield self._file.read(size)
            self._file.readline()
        self._file.readline()

    def rest(self) -> bytes:
        """All that the server still sends before it closes the connection; what it resets counts as closed."""
        try:
            return self._file.read()
        except OSError:
            return b""


def head(method: str, path: str, port: int, **headers: object) -> bytes:
    """The first lines of a request; names of headers with _ for -."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, port: int, fields: dict[str, Any], **headers: object) -> bytes:
    """A whole request with a JSON body."""
    body = json.dumps(fields).encode()
    return head("POST", path, port, Content_Type="application/json", Content_Length=len(body), **headers) + body
