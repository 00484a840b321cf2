"""Models with recurrent layers in the engine: each row holds its states, and writes what the plain loops write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.config import DecodeConfig
from model.decoding import GenerationRequest
from model.loading import load_model, towers_backbone
from model.two_tower.decoding import TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import TwoTowerModel
from model.two_tower.lossless import write_lossless
from model.two_tower.towers import TwoTower
from tests.decoding import make_request
from tests.hybrid import write_hybrid
from tests.tiny import tiny_tokenizer
from tests.towers import VOCAB, shared_towers, shifted

KINDS: list[dict[str, Any]] = [
    {"policy": "budgeted"},
    {"policy": "budgeted", "gamma": 0.3, "steps": 2, "fused": "off"},
    {"policy": "budgeted", "temperature": 1.1, "seed": 4},
    {"mode": "ar"},
    {"mode": "lossless"},
    {"mode": "lossless", "fused": "off"},
    {"mode": "lossless", "temperature": 1.0, "seed": 6},
    {"mode": "lossless", "repetition_penalty": 1.2},
]
WRITERS = {"diffusion": write_blocks, "ar": write_tokens, "lossless": write_lossless}


def requests() -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for i, (length, kind) in enumerate(zip((1, 4, 7, 9, 3, 11, 7, 5), KINDS, strict=True)):
        prompt = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
        made.append(make_request(f"r{i}", prompt, 6 + i, **{"fused": "speculative", **kind}))
    return made


def plainly(towers: TwoTower, request: GenerationRequest) -> tuple[int, ...]:
    mode = request.decode.mode
    decode = request.decode if mode == "diffusion" else DecodeConfig(policy="budgeted")
    asked = TowerRequest(request.prompt_ids, request.max_tokens, decode, request.sampling)
    return WRITERS[mode](towers, [asked])[0].token_ids


def backbone_of(towers: TwoTower) -> Backbone:
    context = Backbone(towers.context.causal_lm, tiny_tokenizer(), None, "tiny", "0", 128, frozenset())
    return towers_backbone(TwoTowerModel(towers, context))


SLOW = ("granitemoehybrid", "falcon_h1", "qwen3_next", "gemma3_text")
FAST = ("nemotron_h", "lfm2", "gemma2")


@pytest.mark.parametrize("kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_rows_of_every_mode_write_what_the_plain_loops_write(kind: str) -> None:
    """In one batch, and preempted with prompts in pieces; in float64, where no grouping can matter."""
    check_all_modes(shared_towers(kind))


def test_with_a_token_shift_they_write_the_plain_loops_tokens_too() -> None:
    check_all_modes(shifted(shared_towers("nemotron_h")))


def check_all_modes(towers: TwoTower) -> None:
    wanted, penalised = requests()[:-1], requests()[-1]
    expected = {request.id: plainly(towers, request) for request in wanted}
    backbone = backbone_of(towers)
    for config in ({"max_rows": 8}, {"max_rows": 7, "pages": 12, "prefill_tokens": 3}):
        engine = Engine(backbone, EngineConfig(max_length=40, **config))
        assert {r.id: r.token_ids for r in generate_all(engine, wanted)} == expected
        stats = engine.stats()
        assert stats.pages_used == 0 and (stats.preemptions > 0) == ("pages" in config)
    ar = make_request("ar", penalised.prompt_ids, penalised.max_tokens, mode="ar", repetition_penalty=1.2)
    both = generate_all(Engine(backbone, EngineConfig(max_length=48)), [penalised, ar])
    assert both[0].token_ids == both[1].token_ids


def test_a_hybrid_of_one_network_decodes_token_by_token(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path / "hybrid")
    engine = Engine(load_model(folder), EngineConfig(max_length=64))
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12)]
    wanted = [make_request(str(i), prompt, 12, mode="ar") for i, prompt in enumerate(prompts)]
    plain = load_model(folder)
    assert plain.reader is not None
    model = load_backbone(folder).model
    model.set_attn_implementation("sdpa")
    for result, prompt in zip(generate_all(engine, wanted), prompts, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(12):  # without a cache: nothing is carried over
            with torch.no_grad():
                ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)), 1)
        assert result.token_ids == tuple(ids[0, len(prompt) :].tolist())
    again = generate_all(engine, wanted)
    assert [result.cached_tokens for result in again] == [0, 0], "a page that is found would bring no states"
