"""A Hub on loopback that holds one dataset: the few endpoints that reading its files takes, with ranges.

with fake_hub("owner/chats", {"data/train-0.jsonl": b"..."}) as hub:
    os.environ["HF_ENDPOINT"] = hub.url           # for another process; huggingface_hub reads it once
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "0" * 40


@dataclass
class Hub:
    """url of the endpoint; asked: (method, path) of every request; tokens: what Authorization headers held."""

    url: str
    dataset: str
    files: Mapping[str, bytes]
    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def entry(self, name: str) -> dict[str, Any]:
        oid = hashlib.sha1(self.files[name]).hexdigest()
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": oid}


@contextlib.contextmanager
def fake_hub(dataset: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serve the dataset on a free port until the block ends."""
    hub = Hub("", dataset, files)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer(head=False)

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        wanted = json.loads(self.rfile.read(length) or b"{}").get("paths", [])
        self._note()
        if re.fullmatch(f"/api/datasets/{self.served.dataset}/paths-info/.+", self._path()):
            self._json([self.served.entry(name) for name in wanted if name in self.served.files])
        else:
            self._missing()

    def _answer(self, *, head: bool) -> None:
        self._note()
        hub, path = self.served, self._path()
        if re.fullmatch(f"/api/datasets/{hub.dataset}(/revision/[^/]+)?", path):
            siblings = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.dataset, "sha": REVISION, "siblings": siblings, "private": False})
        elif re.match(f"/api/datasets/{hub.dataset}/tree/", path):
            self._json([hub.entry(name) for name in hub.files])
        elif (found := re.fullmatch(f"/datasets/{hub.dataset}/resolve/[^/]+/(.+)", path)) and found[1] in hub.files:
            self._file(hub.files[found[1]], hub.entry(found[1])["oid"], head=head)
        else:
            self._missing()

    def _note(self) -> None:
        self.served.asked.append((self.command, self._path()))
        self.served.tokens.add(self.headers.get("Authorization", ""))

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _file(self, content: bytes, oid: str, *, head: bool) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(found[1]), int(found[2] or len(content) - 1)) if found else (0, len(content) - 1)
        part = content[first : last + 1]
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{oid}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if not head:
            self.wfile.write(part)

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
