"""Lossless mode in the engine and over HTTP: in rounds with every other mode, with figures and metrics that agree."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from actors.engine.events import Canvas, Event, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from tests.api.successor import build_successor_model
from tests.decoding import BLOCK, answer, make_request, prompt_of
from tests.direct import client_of, direct_app
from tests.exposition import Values, read, total

BIAS = {40: 100.0}  # the model then writes this token again and again, and drafts it
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "abc"}],
    "max_tokens": 40,
    "logit_bias": {str(token): value for token, value in BIAS.items()},
}


@pytest.fixture(scope="module")
def successor_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_successor_model(tmp_path_factory.mktemp("models") / "successor")


def lossless(**fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields, "diffusion": {"mode": "lossless", **fields.get("diffusion", {})}}


def accepted_of(answers: list[dict[str, Any]], stream: str) -> list[int]:
    """Accepted tokens of every lossless answer, the streamed one last."""
    return [
        *(a["diffusion"]["accepted_tokens"] for a in answers if a["diffusion"]["mode"] == "lossless"),
        *(chunk["diffusion"]["accepted_tokens"] for chunk in chunks_of(stream) if "diffusion" in chunk),
    ]


def chunks_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def test_rows_of_every_mode_share_rounds_and_pages_and_nothing_else(successor_model: Path) -> None:
    backbone: Backbone = load_backbone(successor_model)
    modes: list[dict[str, Any]] = [
        {"mode": "ar"},
        {"mode": "lossless", "fused": "speculative", "logit_bias": tuple(BIAS.items()), "frequency_penalty": 0.3},
        {},
        {"mode": "lossless", "fused": "speculative", "temperature": 1.5, "seed": 1},
        {"mode": "lossless"},
        {"mode": "ar", "temperature": 1.5, "seed": 1},
    ]
    requests = [make_request(f"{i}", prompt_of(9 + i // 2 * 8, i // 2), 40, **kind) for i, kind in enumerate(modes)]
    engine = Engine(backbone, EngineConfig(max_rows=6, max_length=10 * BLOCK, pages=24))
    results = {r.id: r for r in generate_all(engine, requests)}
    for request in requests:
        assert results[request.id].token_ids == answer(backbone, request).token_ids
    stats = engine.stats()
    mine = [r for r in results.values() if r.mode == "lossless"]
    assert len(mine) == 3 and stats.preemptions > 0
    assert sum(r.drafted_tokens for r in mine) == stats.drafted_tokens > stats.accepted_tokens > 0
    assert sum(r.accepted_tokens for r in mine) == stats.accepted_tokens
    assert stats.pages_used == 0


def test_canvases_name_every_position_once_in_order(successor_model: Path) -> None:
    engine, heard = Engine(load_backbone(successor_model)), list[Event]()
    request = make_request("r", prompt_of(9), 40, mode="lossless", fused="speculative", trace=True)
    engine.submit(request, heard.append)
    engine.run_until_idle()
    canvases = [event for event in heard if isinstance(event, Canvas)]
    (result,) = (event.result for event in heard if isinstance(event, Finished))
    told = [(reveal.position, reveal.token) for canvas in canvases for reveal in canvas.reveals]
    assert told == [(9 + i, token) for i, token in enumerate(result.token_ids)]
    for canvas in canvases:
        assert canvas.block_start == canvas.reveals[0].position
        assert canvas.block_size == len(canvas.reveals) and canvas.sub_block_size == 1
    assert len(canvases) == sum(result.forwards.values())


def test_over_http_the_answer_is_ar_mode_s_with_figures_that_the_metrics_repeat(successor_model: Path) -> None:
    app, _ = direct_app(successor_model)

    async def talk() -> tuple[list[dict[str, Any]], str, Values]:
        async with client_of(app) as client:
            asked = [{**CHAT, "diffusion": {"mode": "ar"}}, lossless(), lossless(n=2, temperature=1.5, seed=5)]
            answers = [(await client.post("/v1/chat/completions", json=body)).json() for body in asked]
            stream = await client.post("/v1/chat/completions", json=lossless(stream=True, diffusion={"fused": "off"}))
            values = read((await client.get("/metrics")).text)
            while total(values, "blockcast_accepted_tokens_total") < sum(accepted_of(answers, stream.text)):
                values = read((await client.get("/metrics")).text)  # an answer's end is heard before its round counts
            return answers, stream.text, values

    (ar, mine, drawn), stream, values = asyncio.run(talk())
    assert mine["choices"] == ar["choices"] and mine["usage"]["completion_tokens"] == ar["usage"]["completion_tokens"]
    figures = mine["diffusion"]
    assert figures["mode"] == "lossless" and figures["steps_per_block"] == []
    assert figures["drafted_tokens"] >= figures["accepted_tokens"] > 0
    decided = figures["forwards"]["denoise"] + figures["forwards"]["commit"]
    assert figures["tokens_per_forward"] == mine["usage"]["completion_tokens"] / decided > 1
    assert "drafted_tokens" not in ar["diffusion"]
    each = [choice["diffusion"]["accepted_tokens"] for choice in drawn["choices"]]
    assert drawn["diffusion"]["accepted_tokens"] == sum(each)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(stream) if chunk["choices"])
    assert text == ar["choices"][0]["message"]["content"]
    assert total(values, "blockcast_accepted_tokens_total") == sum(accepted_of([ar, mine, drawn], stream))
    drafted = total(values, "blockcast_drafted_tokens_total")
    assert drafted > mine["diffusion"]["drafted_tokens"] + drawn["diffusion"]["drafted_tokens"]
