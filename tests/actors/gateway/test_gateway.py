"""The gateway over a scripted backend: who may ask, how much at a time, and what a client sees when an engine fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from httpx import ASGITransport

from actors.engine.events import Delta, Event, Failed, Finished
from actors.gateway.admission import Admission
from actors.gateway.app import create_app
from actors.gateway.backend import Served
from actors.gateway.body import BodyReader
from actors.gateway.exposition import Scrape
from model.config import DecodeConfig
from model.decoding import GenerationRequest, GenerationResult
from model.errors import JobError, UserError
from tests.actors.protocol.test_protocol import CARD
from tests.direct import gateway_over

PROMPT = {"model": "tiny", "prompt": "Hi"}
RESULT = GenerationResult(
    id="x",
    token_ids=(5, 6, 2),
    text="ab",
    finish_reason="stop",
    prompt_tokens=2,
    forwards={"prefill": 1, "denoise": 2, "commit": 1},
    steps_per_block=[2],
)
GOOD: list[Event | Exception] = [Delta("x", (5,), "a"), Delta("x", (6, 2), "b"), Finished(RESULT)]


def addressed(event: Event, request_id: str) -> Event:
    """The event with another id."""
    if isinstance(event, Finished):
        return replace(event, result=replace(event.result, id=request_id))
    return replace(event, id=request_id)


class ScriptedBackend:
    """Sends a script's events, raises its exceptions, and never ends where the script says "wait"."""

    def __init__(self, script: list[Any], ready: bool = True) -> None:
        self.script, self.is_ready = script, ready
        self.aborted: list[str] = []
        self.running: list[str] = []
        self.asked: list[tuple[GenerationRequest, ...]] = []
        self.retries = 0

    async def served(self) -> Served:
        return Served(CARD, DecodeConfig(), created=0)

    async def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """The script's events belong to the choice whose index is their id; "x" to the first."""
        self.running.append(requests[0].id)
        self.asked.append(tuple(requests))
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            if step == "wait":
                await asyncio.Event().wait()
            yield addressed(step, requests[0 if step.id == "x" else int(step.id)].id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def ready(self) -> bool:
        if not self.is_ready:
            raise JobError("no engine")
        return True

    async def metrics(self) -> Scrape:
        return Scrape()


def with_client(
    backend: ScriptedBackend,
    talk: Callable[[httpx.AsyncClient], Awaitable[Any]],
    *,
    keys: tuple[str, ...] = (),
    limit: int = 4,
    per_key: int | None = None,
    deadline_s: float = 60,
    cors_origins: tuple[str, ...] = (),
    further: tuple[str, ...] = (),
    address: str = "127.0.0.1",
    log_format: str = "json",
) -> Any:
    """Run `talk` with a client of a gateway over the backend."""

    async def main() -> Any:
        gateway = gateway_over(
            backend,
            keys=keys,
            admission=Admission(limit, per_key),
            bodies=BodyReader(1000, 5),
            deadline_s=deadline_s,
            log_format=log_format,
            further=further,
        )
        app = create_app(gateway, cors_origins=cors_origins)
        transport = ASGITransport(app, client=(address, 5), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await talk(client)

    return asyncio.run(main())


def post(backend: ScriptedBackend, fields: dict[str, Any] = PROMPT, **options: Any) -> httpx.Response:
    return with_client(backend, lambda client: client.post("/v1/completions", json=fields), **options)


def test_an_answer_carries_text_usage_and_figures() -> None:
    body = post(ScriptedBackend(GOOD)).json()
    assert body["choices"][0]["text"] == "ab"
    counts = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    assert body["diffusion"] == {
        "mode": "diffusion",
        "forwards": {"prefill": 1, "denoise": 2, "commit": 1},
        "tokens_per_forward": 1.0,
        "steps_per_block": [2],
    }


def test_a_stream_ends_with_done_and_a_failed_one_with_an_error_and_no_done() -> None:
    good = post(ScriptedBackend(GOOD), {**PROMPT, "stream": True}).text
    assert good.endswith("data: [DONE]\n\n") and good.count('"text":"') == 3
    for failure in (Failed("x", "It broke."), JobError("It broke.")):
        text = post(ScriptedBackend([GOOD[0], failure]), {**PROMPT, "stream": True}).text
        last = json.loads(text.strip().rsplit("data: ", 1)[1])
        assert last["error"]["message"] == "It broke." and last["error"]["type"] == "server_error"
        assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_at_once_is_a_400_and_its_failure_a_500(stream: bool) -> None:
    fields = {**PROMPT, "stream": stream}
    assert post(ScriptedBackend([UserError("Too long.")]), fields).status_code == 400
    failed = post(ScriptedBackend([Failed("x", "It broke.")]), fields)
    assert failed.status_code == 500 and failed.json()["error"]["message"] == "It broke."


def test_a_defect_is_a_500_that_tells_nothing_of_the_inside() -> None:
    response = post(ScriptedBackend([ZeroDivisionError("secret")]))
    assert response.status_code == 500 and "secret" not in response.text


def test_a_full_gateway_answers_429_with_retry_after_and_recovers() -> None:
    backend = ScriptedBackend(["wait"])

    async def talk(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(2)]
        while len(backend.running) < 2:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", json=PROMPT)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        backend.script = GOOD
        return refused, await client.post("/v1/completions", json=PROMPT)

    refused, accepted = with_client(backend, talk, limit=2)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert accepted.status_code == 200
    assert sorted(backend.aborted) == sorted(backend.running[:2])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request_and_a_finished_one_is_left_alone(stream: bool) -> None:
    backend = ScriptedBackend([GOOD[0], "wait"])

    async def leave(client: httpx.AsyncClient) -> None:
        task = asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "stream": stream}))
        while not backend.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)

    with_client(backend, leave)
    assert backend.aborted == backend.running
    finished = ScriptedBackend(GOOD)
    post(finished, {**PROMPT, "stream": stream})
    assert finished.aborted == []


def test_readiness_follows_the_engine_and_health_does_not() -> None:
    async def talk(client: httpx.AsyncClient) -> list[int]:
        return [(await client.get(path)).status_code for path in ("/health", "/ready")]

    assert with_client(ScriptedBackend([], ready=True), talk) == [200, 200]
    assert with_client(ScriptedBackend([], ready=False), talk) == [200, 503]


def test_without_keys_only_this_machine_is_served() -> None:
    assert post(ScriptedBackend(GOOD), address="10.0.0.9").status_code == 403
    assert post(ScriptedBackend(GOOD), address="127.0.0.1").status_code == 200

    async def forwarded(client: httpx.AsyncClient) -> int:
        headers = {"X-Forwarded-For": "10.0.0.9"}
        return (await client.post("/v1/completions", json=PROMPT, headers=headers)).status_code

    assert with_client(ScriptedBackend(GOOD), forwarded) == 403


def test_with_keys_everyone_must_show_one() -> None:
    from actors.gateway.access import load_key_hashes

    keys = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "first,second"})

    def ask(header: dict[str, str], address: str = "10.0.0.9") -> httpx.Response:
        return with_client(
            ScriptedBackend(GOOD),
            lambda client: client.post("/v1/completions", json=PROMPT, headers=header),
            keys=keys,
            address=address,
        )

    assert ask({"Authorization": "Bearer second"}).status_code == 200
    for header in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}, {"Authorization": "Basic first"}):
        response = ask(header)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert ask(header, "127.0.0.1").status_code == 401


def test_one_key_may_not_take_all_slots() -> None:
    from actors.gateway.access import load_key_hashes

    backend = ScriptedBackend(["wait"])
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))

    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers=first))]
        while not backend.running:
            await asyncio.sleep(0.001)
        refused = await client.post("/v1/completions", json=PROMPT, headers=first)
        waiting.append(asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers=second)))
        while len(backend.running) < 2:  # a second one that is refused ends its task
            assert not waiting[1].done()
            await asyncio.sleep(0.001)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return refused

    keys = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "first,second"})
    refused = with_client(backend, talk, keys=keys, per_key=1)
    assert refused.status_code == 429 and "API key" in refused.json()["error"]["message"]
    assert "first" not in refused.text


@pytest.mark.parametrize("script", [["wait"], [GOOD[0], "wait"]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_and_frees_its_row(script: list[Any], stream: bool) -> None:
    backend = ScriptedBackend(script)
    fields = {**PROMPT, "stream": stream}

    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        response = await client.post("/v1/completions", json=fields, headers={"X-Deadline-S": "0.05"})
        await asyncio.sleep(0.02)
        return response

    response = with_client(backend, talk)
    if stream and len(script) == 2:
        error = json.loads(response.text.strip().rsplit("data: ", 1)[1])["error"]
        assert response.status_code == 200 and "[DONE]" not in response.text
    else:
        error = response.json()["error"]
        assert response.status_code == 504
    assert error["code"] == "deadline_exceeded" and "0.05 s" in error["message"]
    assert backend.aborted == backend.running


@pytest.mark.parametrize("asked", ["0", "-1", "61", "nan", "inf", "soon", ""])
def test_a_deadline_that_is_none_is_a_400(asked: str) -> None:
    response = with_client(
        ScriptedBackend(GOOD), lambda c: c.post("/v1/completions", json=PROMPT, headers={"X-Deadline-S": asked})
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "X-Deadline-S"


def test_an_engine_that_stood_still_is_a_503_to_try_again() -> None:
    response = post(ScriptedBackend([Failed("x", "It stood still.", elsewhere=True)]))
    assert response.status_code == 503 and response.headers["retry-after"] == "1"


def test_tokenize_tells_what_a_request_would_be_read_as() -> None:
    def ask(fields: dict[str, Any]) -> httpx.Response:
        return with_client(ScriptedBackend([]), lambda client: client.post("/tokenize", json=fields))

    body = ask({"model": "tiny", "prompt": "Hi"}).json()
    assert body == {
        "tokens": CARD.tokenizer("Hi").input_ids,
        "count": len(body["tokens"]),
        "max_model_len": CARD.context_length,
    }
    chat = ask({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "prompt": None})
    assert chat.json()["count"] > body["count"]
    assert ask({"model": "tiny"}).status_code == 400
    assert ask({"model": "tiny", "prompt": "a", "messages": []}).status_code == 400
    assert ask({"model": "tiny", "promt": "a"}).json()["error"]["param"] == "promt"
    assert ask({"model": "other", "prompt": "a"}).status_code == 404


def test_other_origins_are_told_nothing_unless_they_are_named() -> None:
    headers = {"Origin": "https://page.example"}

    def ask(origins: tuple[str, ...]) -> dict[str, str]:
        get = with_client(ScriptedBackend([]), lambda c: c.get("/health", headers=headers), cors_origins=origins)
        return {name: value for name, value in get.headers.items() if name.startswith("access-control")}

    assert ask(()) == {}
    assert ask(("https://page.example",))["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in ask(("https://other.example",))


class TwoModels(ScriptedBackend):
    """Beside "tiny" there is "tuned"; remembers which one each request was for."""

    def __init__(self) -> None:
        super().__init__(GOOD)
        self.models: list[str | None] = []

    async def served(self, model: str | None = None) -> Served:
        return Served(replace(CARD, name=model or CARD.name), DecodeConfig(), created=7)

    async def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None, model: str | None = None
    ) -> AsyncGenerator[Event, None]:
        self.models.append(model)
        async for event in super().generate(requests):
            yield event


def test_a_request_goes_to_the_model_it_names_and_all_are_listed() -> None:
    backend = TwoModels()

    async def talk(client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(m["id"], m["created"]) for m in listed] == [("tiny", 7), ("tuned", 7)]
        assert (await client.get("/v1/models/tuned")).json()["id"] == "tuned"
        for name in ("tuned", "tiny"):
            answer = await client.post("/v1/completions", json={**PROMPT, "model": name})
            assert answer.json()["model"] == name
        refused = await client.post("/v1/completions", json={**PROMPT, "model": "absent"})
        assert refused.status_code == 404 and "'tiny', 'tuned'" in refused.json()["error"]["message"]
        assert (await client.get("/v1/models/absent")).status_code == 404
        tokens = await client.post("/tokenize", json={**PROMPT, "model": "tuned"})
        assert tokens.status_code == 200

    with_client(backend, talk, further=("tuned",))
    assert backend.models == ["tuned", None]
