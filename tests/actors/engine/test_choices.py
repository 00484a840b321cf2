"""Several answers to one prompt: each with its index, the prompt counted once, and all of them gone together."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.engine.events import Canvas, Delta, Failed, Finished
from actors.gateway.access import load_key_hashes
from actors.protocol.calls import derived_seed, generation_request, parse_call
from actors.protocol.fields import RequestError
from actors.protocol.responses import Totals
from model.config import DecodeConfig
from tests.actors.gateway.test_gateway import PROMPT, RESULT, ScriptedBackend, post, with_client
from tests.actors.protocol.test_protocol import CARD
from tests.api.successor import build_successor_model, letters_after
from tests.direct import client_of, direct_app

TWO = {**PROMPT, "n": 2}
SHORT = replace(RESULT, id="1", token_ids=(5,), text="c", finish_reason="length", steps_per_block=[1])
LONG = replace(RESULT, id="0", cached_tokens=1)
SCRIPT: list[Any] = [
    Delta("1", (5,), "c"),
    Delta("0", (5,), "a"),
    Finished(SHORT),
    Delta("0", (6, 2), "b"),
    Finished(LONG),
]


def calls(fields: dict[str, Any]) -> Any:
    return parse_call(fields, kind="completion", card=CARD, decode=DecodeConfig(), request_id="x", default_seed=7)


def chunks(text: str) -> list[dict[str, Any]]:
    *parts, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


# ------------------------------------------------------------------------------------------------- the requests
def test_the_first_choice_is_the_request_alone_and_the_others_differ_in_seed_and_id_only() -> None:
    (alone,) = calls({**PROMPT, "seed": 5}).requests
    first, *others = calls({**PROMPT, "seed": 5, "n": 3}).requests
    assert first == alone
    for index, other in enumerate(others, 1):
        sampling = replace(alone.sampling, seed=derived_seed(5, str(index)))
        assert other == replace(alone, id=f"x.{index}", follows="x", sampling=sampling)
    seeds = [request.sampling.seed for request in calls({**PROMPT, "seed": 5, "n": 16}).requests]
    assert len(set(seeds)) == 16 and seeds[:3] == [request.sampling.seed for request in (first, *others)]


def test_best_of_goes_with_one_answer_alone_and_a_line_of_prompts_has_no_other() -> None:
    assert len(calls({**PROMPT, "best_of": 1, "n": 1}).requests) == 1
    with pytest.raises(RequestError, match="best_of"):
        calls({**TWO, "best_of": 1})
    line = {"card": CARD, "default_decode": DecodeConfig(), "request_id": "x", "default_seed": 7}
    assert generation_request({"prompt": "Hi", "n": 1}, **line)
    with pytest.raises(RequestError, match="one answer") as refused:
        generation_request({"prompt": "Hi", "n": 2}, **line)
    assert refused.value.param == "n"


# ------------------------------------------------------------------------------------------------- the answer
def test_choices_come_in_their_order_with_figures_of_their_own_and_the_prompt_counts_once() -> None:
    body = post(ScriptedBackend(SCRIPT), TWO).json()
    first, second = body["choices"]
    assert [first["index"], first["text"], first["finish_reason"]] == [0, "ab", "stop"]
    assert [second["index"], second["text"], second["finish_reason"]] == [1, "c", "length"]
    assert (first["diffusion"]["steps_per_block"], second["diffusion"]["steps_per_block"]) == ([2], [1])
    counts = {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert body["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 1}}
    assert body["diffusion"] == {
        "mode": "diffusion",
        "forwards": {"prefill": 2, "denoise": 4, "commit": 2},
        "tokens_per_forward": pytest.approx(4 / 6),
        "steps_per_block": [2, 1],
    }


def test_the_totals_of_one_answer_are_its_own_and_modes_that_differ_are_mixed() -> None:
    alone = Totals.of([RESULT])
    for name in ("prompt_tokens", "completion_tokens", "forwards", "steps_per_block", "mode", "finish_reason"):
        assert getattr(alone, name) == getattr(RESULT, name)
    assert alone.tokens_per_forward == RESULT.tokens_per_forward
    assert Totals.of([RESULT, replace(RESULT, mode="ar")]).mode == "mixed"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_tells_each_piece_s_choice_and_is_done_after_the_last(chat: bool) -> None:
    canvas = Canvas("1", 8, (), block_size=8, sub_block_size=4, prompt_tokens=2)
    backend = ScriptedBackend([canvas, *SCRIPT])
    fields = {**TWO, "stream": True, "stream_options": {"include_usage": True}, "diffusion": {"trace": True}}
    path = "/v1/completions"
    if chat:
        path = "/v1/chat/completions"
        fields = {**fields, "messages": [{"role": "user", "content": "Hi"}]}
        del fields["prompt"]
    text = with_client(backend, lambda client: client.post(path, json=fields)).text
    said = chunks(text.replace("event: canvas\n", ""))
    drawn = next(chunk for chunk in said if "reveals" in chunk)
    said.remove(drawn)
    assert drawn["index"] == 1 and drawn["id"] == said[0]["id"]
    *told, tail = said
    assert tail["choices"] == [] and tail["usage"]["completion_tokens"] == 4
    pieces = [chunk["choices"][0] for chunk in told]
    if chat:
        assert [(p["index"], p["delta"].get("role")) for p in pieces[:2]] == [(0, "assistant"), (1, "assistant")]
    texts = [(p["index"], p["delta"].get("content") if chat else p["text"]) for p in pieces]
    assert [pair for pair in texts if pair[1]] == [(1, "c"), (0, "a"), (0, "b")]
    ends = [(chunk["choices"][0]["index"], chunk.get("diffusion")) for chunk in told if "diffusion" in chunk]
    assert [(index, figures["steps_per_block"]) for index, figures in ends] == [(1, [1]), (0, [2])]
    assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["length", "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_fails_the_request_and_the_others_are_freed(stream: bool) -> None:
    backend = ScriptedBackend([*SCRIPT[:3], Failed("0", "It broke.")])
    script_goes_on = ScriptedBackend([SCRIPT[0], Failed("1", "It broke."), "wait"])
    for script in (backend, script_goes_on):

        async def talk(client: httpx.AsyncClient) -> httpx.Response:
            response = await client.post("/v1/completions", json={**TWO, "stream": stream})
            await asyncio.sleep(0.02)
            return response

        response = with_client(script, talk)
        last = response.text.strip().rsplit("data: ", 1)[-1]
        assert json.loads(last)["error"]["message"] == "It broke." and "[DONE]" not in response.text
        assert response.status_code == (200 if stream else 500)
    assert backend.aborted == [] and script_goes_on.aborted == script_goes_on.running, "only where one was left"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_when_one_answer_is_whole_frees_the_others(stream: bool) -> None:
    backend = ScriptedBackend([*SCRIPT[:3], "wait"])

    async def late(client: httpx.AsyncClient) -> httpx.Response:
        headers = {"X-Deadline-S": "0.05"}
        response = await client.post("/v1/completions", json={**TWO, "stream": stream}, headers=headers)
        await asyncio.sleep(0.02)
        return response

    assert "deadline_exceeded" in with_client(backend, late).text
    assert backend.aborted == backend.running


def test_every_answer_takes_a_slot_and_what_can_never_fit_is_a_400() -> None:
    backend = ScriptedBackend(["wait"])
    keys = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "first,second"})
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        async def ask(n: int, headers: dict[str, str]) -> httpx.Response:
            return await client.post("/v1/completions", json={**PROMPT, "n": n}, headers=headers)

        waiting = asyncio.create_task(ask(3, first))
        while not backend.running:
            await asyncio.sleep(0.001)
        refused = [await ask(*asked) for asked in ((2, first), (3, second), (5, second))]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        backend.script = [Finished(replace(SHORT, id=str(index))) for index in range(4)]
        return [*refused, *[await ask(4, key) for key in (first, second)]]

    answers = with_client(backend, talk, keys=keys, limit=5, per_key=4)
    assert [answer.status_code for answer in answers] == [429, 429, 400, 200, 200]
    assert answers[2].json()["error"]["param"] == "n" and "at most 4" in answers[2].json()["error"]["message"]


# ------------------------------------------------------------------------------------------------- a real engine
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers are certain; at temperature 2 draws wander."""
    return build_successor_model(tmp_path_factory.mktemp("models") / "wandering", sharpness=9.0)


def test_the_first_choice_is_what_the_request_gives_alone_and_seeds_repeat_all_of_them(model: Path) -> None:
    app, gateway = direct_app(model)
    prompt = {"model": "tiny", "prompt": "nonce " * 8 + "a", "max_tokens": 24}
    drawn = {**prompt, "temperature": 2.0, "top_k": 4, "seed": 11}

    async def talk() -> list[dict[str, Any]]:
        async with client_of(app) as client:
            asked = [{**fields, "n": n} for fields, n in itertools.product((prompt, drawn), (1, 4, 4))]
            return [(await client.post("/v1/completions", json=fields)).json() for fields in asked]

    answers = asyncio.run(talk())
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[:3] == [[letters_after("a", 24)], [letters_after("a", 24)] * 4, [letters_after("a", 24)] * 4]
    (alone,), first, again = texts[3:]
    assert first == again and first[0] == alone and len(set(first)) == 4
    usage = answers[1]["usage"]
    assert usage["completion_tokens"] == 4 * 24 and usage["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]
    engine = gateway.backend.replicas[0]._engine  # type: ignore[attr-defined]
    assert engine.stats().pages_used == 0


def test_the_prompt_is_encoded_once_for_all_choices(model: Path) -> None:
    app, gateway = direct_app(model, engine={"max_rows": 4})
    prompt = "nonce " * 40 + "a"
    engine = gateway.backend.replicas[0]._engine  # type: ignore[attr-defined]

    async def talk() -> tuple[int, int]:
        async with client_of(app) as client:
            before = engine.stats().query_tokens
            fields = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "n": 4}
            answer = (await client.post("/v1/completions", json=fields)).json()
            return engine.stats().query_tokens - before, answer["usage"]["prompt_tokens"]

    asked, tokens = asyncio.run(talk())
    assert 200 < tokens < asked < tokens + 4 * 32, "the prompt once, and a block's steps for each"


def test_logprobs_belong_to_their_own_choice(model: Path) -> None:
    app, _ = direct_app(model)
    fields = {"model": "tiny", "prompt": "a", "max_tokens": 12, "temperature": 2.0, "seed": 3, "n": 3, "logprobs": 1}

    async def talk() -> tuple[dict[str, Any], str]:
        async with client_of(app) as client:
            whole = (await client.post("/v1/completions", json=fields)).json()
            return whole, (await client.post("/v1/completions", json={**fields, "stream": True})).text

    whole, text = asyncio.run(talk())
    for choice in whole["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 12
        pieces = [chunk["choices"][0] for chunk in chunks(text) if chunk["choices"][0]["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"][name]] == values
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
