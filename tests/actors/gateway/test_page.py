"""The page's files as the gateway sends them: complete, from nowhere else, behind a strict policy."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from actors.gateway.access import load_key_hashes
from actors.gateway.page import page_files
from tests.actors.gateway.test_gateway import ScriptedBackend, with_client

NAMES = re.compile(r'(?:href|src)="([^"]+)"|from "\./([^"]+)"')
OWN_NAMESPACE = "http://www.w3.org/2000/svg"


def get(path: str, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    return with_client(ScriptedBackend([]), lambda client: client.get(path, headers=headers), **options)


def test_the_page_and_every_file_that_it_names_are_served() -> None:
    page = get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    texts = {name: file.content.decode() for name, file in page_files().items()}
    named = {(a.removeprefix("page/") or b) for text in texts.values() for a, b in NAMES.findall(text)}
    assert named == set(texts) - {"index.html"}
    types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name in named:
        file = get(f"/page/{name}")
        assert file.status_code == 200 and file.headers["content-type"].startswith(types[name.rpartition(".")[2]])


def test_nothing_comes_from_elsewhere_and_no_text_can_become_markup() -> None:
    for name, file in page_files().items():
        text = file.content.decode().replace(OWN_NAMESPACE, "")
        assert "//" not in re.sub(r"^\s*//.*|// .*$", "", text, flags=re.MULTILINE), f"{name} names another address"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text)
        assert not re.search(r"localStorage|sessionStorage|indexedDB|\.cookie", text), "a key stays in memory"
        if name.endswith(".html"):
            assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", text)


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_a_strict_policy_comes_with_every_file(path: str) -> None:
    headers = get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_an_unchanged_file_is_not_sent_again_and_an_unknown_one_is_a_404() -> None:
    tag = get("/page/main.js").headers["etag"]
    again = get("/page/main.js", {"If-None-Match": tag})
    assert again.status_code == 304 and not again.content
    for path in ("/page/nothing.js", "/page/__init__.py", "/page/..%2f__init__.py"):
        assert get(path).status_code == 404
        assert "message" in get(path).json()["error"]


def test_without_keys_the_page_is_for_this_machine_and_with_keys_it_is_open_but_its_data_is_not() -> None:
    keys = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "secret"})
    for path in ("/", "/page/main.js"):
        assert get(path, address="10.0.0.9").status_code == 403
        assert get(path, {"Host": "elsewhere.example"}).status_code == 403
        assert get(path, address="10.0.0.9", keys=keys).status_code == 200
    assert get("/v1/models", address="10.0.0.9", keys=keys).status_code == 401


def test_a_listed_model_says_how_it_writes_blocks() -> None:
    entry = get("/v1/models").json()["data"][0]
    assert entry["block_diffusion"] == {"block_size": 8, "sub_block_size": 4}
    assert entry["max_model_len"] == 512
