"""A TwoTower folder with one copy of the weights in the engine: the plain loops' tokens, and the base model's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import load_backbone
from model.config import DecodeConfig
from model.loading import load_model, model_revision
from model.two_tower.adapter import default_settings
from model.two_tower.folder import load_two_tower
from tests.actors.engine.test_two_tower import plainly, requests
from tests.decoding import make_request, prompt_of
from tests.towers import build_tower_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tower_folder(tmp_path_factory.mktemp("models") / "shared", lora=default_settings(4))


def test_with_a_token_shift_every_mode_writes_what_the_plain_loops_write(tmp_path: Path) -> None:
    """A row's canvas waits for the context's logit of its first slot, so it shares no forward with clean tokens."""
    folder = build_tower_folder(tmp_path / "shared", lora=default_settings(4), token_shift=True)
    towers = load_two_tower(folder)
    engine = Engine(load_model(folder), EngineConfig(max_length=96, max_rows=13))
    results = {result.id: result.token_ids for result in generate_all(engine, requests())}
    assert results == {request.id: plainly(towers, request) for request in requests()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[int, ...]]:
    towers = load_two_tower(folder)
    return {request.id: plainly(towers, request) for request in requests()}


@pytest.mark.parametrize(
    "config",
    [
        {"max_rows": 13},
        {"max_rows": 13, "kernels": False},
        {"max_rows": 6, "pages": 16, "prefill_tokens": 5, "kernels": False},
    ],
    ids=str,
)
def test_every_mode_writes_what_the_plain_loops_write(
    folder: Path, expected: dict[str, tuple[int, ...]], config: dict[str, Any]
) -> None:
    """With our kernels or in PyTorch, and with too few pages for all rows."""
    engine = Engine(load_model(folder), EngineConfig(max_length=96, **config))
    results = {result.id: result.token_ids for result in generate_all(engine, requests())}
    assert results == expected
    assert engine.stats().pages_used == 0


def test_clean_tokens_and_canvases_share_a_forward(folder: Path) -> None:
    """The prompt and the first step, a commit and the next block's first step: one forward each, of one network."""
    seen = {}
    for fused in ("speculative", "off"):
        engine = Engine(load_model(folder), EngineConfig(max_length=96))
        request = make_request("r", prompt_of(11), 24, policy="budgeted", steps=2, fused=fused)
        (result,) = generate_all(engine, [request])
        seen[fused] = engine.stats().rounds, result.forwards, result.token_ids
    assert seen["speculative"][:2] == (6, {"prefill": 0, "denoise": 6, "commit": 0})
    assert seen["off"][:2] == (9, {"prefill": 1, "denoise": 6, "commit": 2})
    assert seen["speculative"][2] == seen["off"][2]


def test_ar_and_greedy_lossless_rows_write_what_the_base_model_writes(
    folder: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    base = Engine(load_backbone(folder.parent / "shared_base"), EngineConfig(max_length=96))
    lossless = [r for r in requests() if r.decode.mode == "lossless" and r.sampling.greedy]
    as_ar = [replace(request, decode=DecodeConfig(mode="ar")) for request in lossless]
    for result in generate_all(base, [*as_ar, *(r for r in requests() if r.decode.mode == "ar")]):
        assert result.token_ids == expected[result.id]


def test_a_changed_adapter_is_another_revision(folder: Path) -> None:
    """Answers are found again by the revision, so it covers the adapter, the mask and the time conditioning."""
    before = model_revision(folder)
    for path in (folder / "denoiser" / "adapter_model.safetensors", *folder.glob("*.safetensors")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert model_revision(folder) != before
        path.write_bytes(whole)
    assert model_revision(folder) == before
