"""The page at `/`: a prompt, the canvas of its answer as it fills, and the same weights token by token beside it.

The files stand beside this one and speak plain HTTP to the gateway that serves them; nothing comes from elsewhere. They
hold no data, so with API keys they are open and the page asks for a key, which it keeps in memory alone. Without keys
they follow the API's rule: this machine only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from actors.gateway.gateway import Gateway

FIRST = "index.html"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Own files only, no script or style in the markup, and no way for text to become markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file as it is sent. tag: its ETag."""

    content: bytes
    type: str
    tag: str


def page_files() -> dict[str, PageFile]:
    """The page's files by name."""
    found = {}
    for file in files(__package__).iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in TYPES:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[file.name] = PageFile(content, TYPES[ending], tag)
    return found


def add_page(app: FastAPI, gateway: Gateway) -> None:
    """Serve the page at `/` and its files under `/page/`."""
    known = page_files()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _send(request, known[FIRST])

    @app.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file(request: Request, name: str) -> Response:
        if name not in known:
            raise HTTPException(404, f"The page has no file {name[:100]!r}.")
        return _send(request, known[name])

    def _send(request: Request, file: PageFile) -> Response:
        if not gateway.access.key_hashes:
            gateway.check_access(request)
        headers = {**HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.type, headers=headers)
