"""The served OpenAPI document, asked by a tool that reads nothing else, and the streams that it describes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.api.conftest import KEYS, MODEL, Guarded, Server

pytestmark = pytest.mark.slow
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "a"}


@pytest.fixture(scope="module")
def http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


SETTINGS = """
seed = 1
hooks = "tests.api.schemathesis_hooks"
continue-on-failure = true
[generation]
max-examples = 10
deterministic = true
database = "none"
no-shrink = true
[phases.stateful]
enabled = false
"""


def schemathesis(project: Path, folder: Path, url: str, *options: str) -> str:
    """What it says of a server after its cases; fails unless all of them passed."""
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    program = Path(sys.executable).parent / "schemathesis"
    command = [str(program), "--config-file", str(settings), "run", f"{url}/openapi.json", "--no-color", *options]
    environment = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_the_server_does_what_its_document_says_and_nothing_else(project: Path, tmp_path: Path, server: Server) -> None:
    said = schemathesis(project, tmp_path, server.url)
    assert re.search(r"Tested: 8\b", said)
    assert int(re.search(r"(\d+) generated", said)[1]) > 500


def test_what_the_document_guards_with_a_key_is_guarded(project: Path, tmp_path: Path, guarded: Guarded) -> None:
    url = guarded.server.url + guarded.path
    with_key = ("--header", f"Authorization: Bearer {KEYS[0]}", "--url", url)
    only = ("--phases", "coverage", "--include-path-regex", "models|health", "--max-examples", "5")
    said = schemathesis(project, tmp_path, url, *with_key, *only)
    assert re.search(r"Tested: 3\b", said)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("trace", [False, True])
def test_every_event_of_a_stream_is_as_documented(http: httpx.Client, logprobs: bool, usage: bool, trace: bool) -> None:
    components = http.get("/openapi.json").json()["components"]
    chat: dict[str, Any] = {**CHAT, **({"logprobs": True, "top_logprobs": 2} if logprobs else {})}
    prompt: dict[str, Any] = {**PROMPT, **({"logprobs": 2} if logprobs else {})}
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": usage}, "diffusion": {"trace": trace}}
    for path, fields, chunk in (
        ("/v1/chat/completions", chat, "ChatChunk"),
        ("/v1/completions", prompt, "CompletionChunk"),
    ):
        seen = events(http.post(path, json={**fields, **more}).text)
        assert seen[-1] == ("message", "[DONE]")
        for name, data in seen[:-1]:
            kind = "CanvasEvent" if name == "canvas" else chunk
            schema = {"$ref": f"#/components/schemas/{kind}", "components": components}
            Draft202012Validator(schema).validate(json.loads(data))
        assert ("canvas" in dict(seen)) == trace


def events(text: str) -> list[tuple[str, str]]:
    """(event, data) of each server-sent event."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", "message"), fields["data"]))
    return found
