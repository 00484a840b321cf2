"""Two models and an adapter on one application: every answer comes from the weights that its request names."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.backbone import load_backbone
from model.config import DecodeConfig
from model.decoding import GenerationRequest
from tests.adapters import build_adapter
from tests.api.successor import letters_after
from tests.scaling.conftest import MODEL, App
from tests.tiny import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = tuple(range(20, 60))
TOKENS = 24


def words(model: Path, adapter: Path | None = None) -> str:
    """What these weights answer to PROMPT, from an engine called directly."""
    backbone = load_backbone(model, adapter=adapter)
    request = GenerationRequest(
        id="r",
        prompt_ids=PROMPT,
        max_tokens=TOKENS,
        decode=DecodeConfig(mode="ar"),
        stop_token_ids=backbone.stop_token_ids,
    )
    return generate_all(Engine(backbone), [request])[0].text


def test_interleaved_requests_are_answered_by_the_weights_they_name(app: App, slow_model: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", initializer_range=0.5, seed=3)
    adapter = build_adapter(other, tmp_path / "adapter", seed=4)
    expected = {"other": words(other), "tuned": words(other, adapter)}
    assert expected["other"] != expected["tuned"]
    models = [{"name": "other", "model": str(other)}, {"name": "tuned", "model": str(other), "adapter": str(adapter)}]
    app.deploy(slow_model, models=models, models_per_replica=1)  # they take turns on the shelf
    client = app.client()
    assert [m.id for m in client.models.list()] == [MODEL, "other", "tuned"]
    assert client.models.retrieve("tuned").id == "tuned"
    with pytest.raises(openai.NotFoundError, match="tuned"):
        client.completions.create(model="absent", prompt="a")

    started = threading.Barrier(4)

    def ask(name: str, times: int) -> None:
        started.wait()
        for _ in range(times):
            if name == MODEL:
                answer = client.completions.create(model=name, prompt="a", max_tokens=TOKENS)
                assert answer.choices[0].text == letters_after("a", TOKENS)
            else:
                answer = client.completions.create(model=name, prompt=list(PROMPT), max_tokens=TOKENS)
                assert answer.choices[0].text == expected[name]
            assert answer.model == name

    with ThreadPoolExecutor(4) as pool:
        names = [MODEL, "other", "tuned", "other"]
        for done in [pool.submit(ask, name, 6) for name in names]:
            done.result()
