"""Canvas events over HTTP: what a client that asks for a trace sees of each forward."""

from __future__ import annotations

import json
from typing import Any

from actors.engine.events import Canvas, Finished
from model.decoding import Reveal
from tests.actors.gateway.test_gateway import PROMPT, RESULT, ScriptedBackend, post
from tests.tiny import tiny_tokenizer

TRACED = {**PROMPT, "stream": True, "diffusion": {"trace": True}}


def canvases(text: str) -> list[dict[str, Any]]:
    parts = [part for part in text.split("\n\n") if part.startswith("event: canvas\n")]
    return [json.loads(part.partition("data: ")[2]) for part in parts]


def test_a_canvas_tells_positions_tokens_and_their_text_and_the_shape_of_the_block() -> None:
    ids = [2, *tiny_tokenizer()("a\n é").input_ids]
    reveals = tuple(Reveal(9 + i, token, 0.5) for i, token in enumerate(ids))
    script = [Canvas("x", 8, reveals, block_size=8, sub_block_size=4, prompt_tokens=9), Finished(RESULT)]
    (canvas,) = canvases(post(ScriptedBackend(script), TRACED).text)
    texts = [reveal.pop("text") for reveal in canvas["reveals"]]
    assert texts == ["<|im_end|>", "a", "\n", " ", "bytes:\\xc3", "bytes:\\xa9"]
    expected = [{"position": 9 + i, "token_id": token, "confidence": 0.5} for i, token in enumerate(ids)]
    assert canvas["reveals"] == expected
    shape = {"prompt_tokens": 9, "block_size": 8, "sub_block_size": 4, "block_start": 8}
    assert {name: canvas[name] for name in shape} == shape
