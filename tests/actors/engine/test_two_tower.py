"""TwoTower in the engine: what the plain loops of `model.two_tower` write, in any company, with few pages too."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.engine.events import Canvas, Delta, Event, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone
from model.config import DecodeConfig
from model.decoding import GenerationRequest, GenerationResult
from model.decoding.row import Query
from model.decoding.tower_rows import LosslessTowerRow
from model.errors import UserError
from model.kernels.paged_attention import available
from model.loading import load_model
from model.two_tower.decoding import TowerRequest, write_blocks, write_tokens
from model.two_tower.folder import TwoTowerModel, load_two_tower
from model.two_tower.lossless import write_lossless
from tests.decoding import answer, make_request, prompt_of
from tests.direct import client_of, direct_app

BLOCK = 8
KINDS: list[dict[str, Any]] = [
    {"policy": "budgeted"},
    {"policy": "budgeted", "gamma": 0.3, "steps": 3},
    {"threshold": 0.4, "fused": "off"},
    {"policy": "entropy", "gamma": 0.5, "temperature": 0.9, "seed": 3},
    {"policy": "budgeted", "gamma": 0.5, "temperature": 1.1, "top_p": 0.9, "seed": 4},
    {"policy": "sequential"},
    {"policy": "prophet"},
    {"mode": "ar"},
    {"mode": "ar", "temperature": 1.0, "seed": 5},
    {"mode": "lossless"},
    {"mode": "lossless", "fused": "off"},
    {"mode": "lossless", "temperature": 1.0, "seed": 6},
    {"mode": "lossless", "temperature": 1.0, "top_k": 9, "seed": 7},
]
WRITERS = {"diffusion": write_blocks, "ar": write_tokens, "lossless": write_lossless}


@pytest.fixture(scope="module", params=[False, True], ids=["published", "token_shift"])
def tower_folder(request: pytest.FixtureRequest, tower_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny towers, and the same with a token shift."""
    if not request.param:
        return tower_folder
    folder = Path(shutil.copytree(tower_folder, tmp_path_factory.mktemp("shifted") / "towers"))
    config = json.loads((folder / "two_tower.json").read_text())
    (folder / "two_tower.json").write_text(json.dumps({**config, "token_shift": True}))
    return folder


@pytest.fixture(scope="module")
def towers(tower_folder: Path) -> TwoTowerModel:
    return load_two_tower(tower_folder)


@pytest.fixture(scope="module")
def backbone(tower_folder: Path) -> Backbone:
    return load_model(tower_folder)


def requests() -> list[GenerationRequest]:
    lengths = [1, 5, 7, 8, 9, 15, 16, 17, 23, 30, 3, 12, 24]
    made = []
    for i, (n, kind) in enumerate(zip(lengths, KINDS, strict=True)):
        made.append(make_request(f"r{i}", prompt_of(n, i), 5 + 7 * i % 20, **{"fused": "speculative", **kind}))
    return made


def plainly(model: TwoTowerModel, request: GenerationRequest) -> tuple[int, ...]:
    """The request through the loops that know no scheduler, no packing and no pages of others."""
    mode = request.decode.mode
    decode = request.decode if mode == "diffusion" else DecodeConfig(policy="budgeted")
    asked = TowerRequest(request.prompt_ids, request.max_tokens, decode, request.sampling, request.stop_token_ids)
    return WRITERS[mode](model.towers, [asked])[0].token_ids


@pytest.fixture(scope="module")
def expected(towers: TwoTowerModel) -> dict[str, tuple[int, ...]]:
    return {request.id: plainly(towers, request) for request in requests()}


@pytest.mark.parametrize(
    "config",
    [
        {"max_rows": 13},
        {"max_rows": 13, "kernels": False},
        {"max_rows": 1},
        {"max_rows": 6, "pages": 16, "prefill_tokens": 5},
        {"max_rows": 4, "prefix_cache": False, "prefill_tokens": 3, "rounds_per_visit": 3},
    ],
    ids=str,
)
def test_every_mode_writes_what_the_plain_loops_write(
    tower_folder: Path, expected: dict[str, tuple[int, ...]], config: dict[str, Any]
) -> None:
    """All together, alone, without our kernels, without enough pages, in small pieces of prompt."""
    engine = Engine(load_model(tower_folder), EngineConfig(max_length=96, **config))
    results = {result.id: result for result in generate_all(engine, requests())}
    assert {name: result.token_ids for name, result in results.items()} == expected
    fused = getattr(engine.decoder.writer, "_fused", None)
    assert (engine.decoder.fused is not None) == (fused is not None) == config.get("kernels", available())
    stats = engine.stats()
    assert stats.pages_used == 0 and (stats.preemptions > 0) == ("pages" in config)
    counted = {phase: sum(result.forwards[phase] for result in results.values()) for phase in stats.forwards}
    assert stats.forwards == counted
    lossless = [result for result in results.values() if result.mode == "lossless"]
    assert sum(result.drafted_tokens for result in lossless) == stats.drafted_tokens > stats.accepted_tokens > 0


def test_a_commit_and_the_next_block_s_first_step_share_a_round(backbone: Backbone) -> None:
    """A round is a forward of each tower; `off` has them in rounds of their own, with the same forwards and tokens."""
    seen = {}
    for fused in ("speculative", "off"):
        engine = Engine(backbone, EngineConfig(max_length=96))
        request = make_request("r", prompt_of(11), 3 * BLOCK, policy="budgeted", steps=2, fused=fused)
        (result,) = generate_all(engine, [request])
        assert result.steps_per_block == [2, 2, 2] and result.forwards == {"prefill": 1, "denoise": 6, "commit": 2}
        assert result.tokens_per_forward == 3 * BLOCK / 8
        seen[fused] = engine.stats().rounds, result.token_ids
    assert seen["speculative"] == (6, seen["off"][1]) and seen["off"][0] == 9


@pytest.mark.parametrize("mode", ["diffusion", "lossless"])
def test_a_stop_inside_a_block_or_a_draft_ends_the_answer_there(
    backbone: Backbone, towers: TwoTowerModel, mode: str
) -> None:
    free = answer(backbone, make_request("free", prompt_of(9), 20, mode=mode, policy="budgeted"))
    for place in (1, 4, 9, 12):
        stop = free.token_ids[place]
        request = make_request("r", prompt_of(9), 20, mode=mode, policy="budgeted", stop=[stop], fused="speculative")
        result = answer(backbone, request)
        assert result.token_ids == plainly(towers, request) == free.token_ids[: free.token_ids.index(stop) + 1]
        assert result.finish_reason == "stop"


class _Adversary(LosslessTowerRow):
    """Its drafts are right but for their last token."""

    truth: tuple[int, ...] = ()

    def verify(self, query: Any, written: Any, draft: Any) -> Any:
        if query.noisy:
            begin = self.frontier - self.prompt_length
            draft.tokens[:] = self.truth[begin : begin + len(draft)]
            draft.tokens[-1] = (draft.tokens[-1] + 1) % 200
        return super().verify(query, written, draft)


def test_lossless_mode_is_ar_mode_whatever_is_drafted(
    backbone: Backbone, towers: TwoTowerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("r", prompt_of(13), 40, mode="lossless", fused="speculative")
    ar = answer(backbone, replace(request, decode=DecodeConfig(mode="ar")))
    assert answer(backbone, request).token_ids == ar.token_ids
    monkeypatch.setattr(_Adversary, "truth", ar.token_ids)
    monkeypatch.setattr("model.decoding.decoder.LosslessTowerRow", _Adversary)
    result = answer(backbone, request)
    assert result.token_ids == ar.token_ids
    assert 0 < result.drafted_tokens - result.accepted_tokens < result.accepted_tokens
    assert 3 * result.forwards["commit"] < ar.forwards["commit"]


def test_a_draft_s_canvas_holds_the_drafted_slots_and_no_more(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the token decided last; an untrained denoiser's drafts are rejected, so they grow short."""
    canvases: list[tuple[int, int]] = []
    ask = LosslessTowerRow.next_query

    def watched(row: LosslessTowerRow, tokens: int = 0) -> Query:
        query = ask(row, tokens)
        if query.noisy:
            canvases.append((len(query), query.drafts))
        return query

    monkeypatch.setattr(LosslessTowerRow, "next_query", watched)
    answer(backbone, make_request("r", prompt_of(9), 24, mode="lossless", fused="speculative"))
    assert all(slots == drafts + 1 for slots, drafts in canvases)
    assert max(canvases)[0] == BLOCK and min(canvases)[0] < BLOCK


def test_streams_tell_every_token_once_and_canvases_the_denoiser_s_blocks(backbone: Backbone) -> None:
    engine = Engine(backbone)
    request = make_request("r", prompt_of(10), 20, policy="budgeted", fused="speculative", trace=True, logprobs=1)
    heard: list[Event] = []
    engine.submit(request, heard.append)
    engine.run_until_idle()
    (result,) = (event.result for event in heard if isinstance(event, Finished))
    deltas = [event for event in heard if isinstance(event, Delta)]
    assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
    assert "".join(delta.text for delta in deltas) == result.text and len(result.logprobs or ()) == 20
    canvases = [event for event in heard if isinstance(event, Canvas)]
    assert [canvas.block_start for canvas in canvases] == sorted(canvas.block_start for canvas in canvases)
    assert {canvas.block_start for canvas in canvases} == {10, 18, 26}
    assert {(canvas.block_size, canvas.sub_block_size) for canvas in canvases} == {(BLOCK, BLOCK)}
    told = {reveal.position: reveal.token for canvas in canvases for reveal in canvas.reveals}
    assert tuple(told[10 + i] for i in range(20)) == result.token_ids


def test_all_modes_find_each_other_s_prefixes_and_go_on_where_another_engine_stopped(backbone: Backbone) -> None:
    engine, prompt = Engine(backbone), prompt_of(4 * BLOCK)
    modes: list[dict[str, Any]] = [{"policy": "budgeted"}, {"mode": "ar"}, {"mode": "lossless"}, {"policy": "budgeted"}]
    assert len(set(engine.decoder.salts().values())) == 1
    results = []
    for i, kind in enumerate(modes):
        results += generate_all(engine, [make_request(str(i), prompt, 20, fused="speculative", **kind)])
    # AR needs the last prompt token's logit, and so a page less; blocks need none, and read no prompt at all, unless
    # the context tower decides their first token
    assert backbone.writer is not None
    reads = int(backbone.writer.token_shift)
    assert [result.cached_tokens for result in results] == [0, 3 * BLOCK, 3 * BLOCK, (4 - reads) * BLOCK]
    assert results[3].token_ids == results[0].token_ids and results[3].forwards["prefill"] == reads
    assert results[1].token_ids == results[2].token_ids
    for known in (1, BLOCK, BLOCK + 1, 19):
        for kind, whole in zip(modes, results[:3], strict=False):
            request = make_request("again", prompt, 20, fused="speculative", **kind)
            result = answer(backbone, replace(request, answered=whole.token_ids[:known]))
            assert (result.token_ids, result.text) == (whole.token_ids, whole.text)


def test_blocks_may_reach_beyond_the_longest_row(backbone: Backbone, towers: TwoTowerModel) -> None:
    """A canvas is never cut, nor is an answer that ends inside one."""
    for kind in ({"policy": "budgeted"}, {"mode": "lossless"}):
        request = make_request("r", prompt_of(20), 13, fused="speculative", **kind)
        assert answer(backbone, request, max_length=33, max_rows=1).token_ids == plainly(towers, request)


def test_penalties_count_and_auto_chooses_a_mode(backbone: Backbone) -> None:
    biased = [make_request("b", prompt_of(9), 12, policy="budgeted", logit_bias=((50, 100.0),), frequency_penalty=0.1)]
    assert set(answer(backbone, biased[0]).token_ids) == {50}
    lossless, ar = (
        answer(backbone, make_request("p", prompt_of(9), 16, mode=mode, repetition_penalty=1.5, fused="speculative"))
        for mode in ("lossless", "ar")
    )
    assert lossless.token_ids == ar.token_ids
    result: GenerationResult = answer(backbone, make_request("a", prompt_of(9), 12, mode="auto"), max_length=64)
    assert result.mode in ("ar", "diffusion") and result.completion_tokens == 12


# ------------------------------------------------------------------------------------------------- what cannot be
def test_a_folder_without_its_denoiser_decodes_token_by_token_and_says_so(tower_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tower_folder, tmp_path / "towers"))
    shutil.rmtree(folder / "denoiser")
    for mode in (None, "diffusion", "lossless", "auto"):
        with pytest.raises(UserError, match=r"lacks the folder denoiser: .* set decode\.mode ar"):
            load_model(folder, mode=mode)
    alone, whole = load_model(folder, mode="ar"), load_model(tower_folder)
    request = make_request("r", prompt_of(9), 12, mode="ar")
    assert answer(alone, request).token_ids == answer(whole, request).token_ids
    with pytest.raises(UserError, match="needs a model adapted to write blocks"):
        answer(alone, replace(request, decode=DecodeConfig(policy="budgeted")))


def test_what_means_nothing_to_two_towers_is_refused(backbone: Backbone, tower_folder: Path) -> None:
    for fields, message in (
        ({"sub_block_size": 4}, "sub_block_size 4 has no effect on a TwoTower model"),
        ({"refresh": "sub_block"}, "refresh sub_block has no effect on a TwoTower model"),
    ):
        with pytest.raises(UserError, match=message):
            answer(backbone, make_request("r", prompt_of(9), 12, policy="budgeted", **fields))
    with pytest.raises(UserError, match="holds two towers, and an adapter belongs to one network"):
        load_model(tower_folder, adapter=tower_folder)
    with pytest.raises(UserError, match=r"pages 4 of 8 tokens do not hold one row of 40: give at least 5"):
        Engine(backbone, EngineConfig(max_length=32, pages=4))


# ------------------------------------------------------------------------------------------------- over HTTP
def test_over_http_a_tower_folder_answers_in_every_mode(tower_folder: Path) -> None:
    app, _ = direct_app(tower_folder)
    body = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 20}

    async def talk() -> list[Any]:
        async with client_of(app) as client:
            said = [(await client.get("/v1/models")).json()]
            for diffusion in ({}, {"mode": "ar"}, {"mode": "lossless"}, {"policy": "threshold", "threshold": 0.5}):
                said.append((await client.post("/v1/completions", json={**body, "diffusion": diffusion})).json())
            refused = await client.post("/v1/completions", json={**body, "diffusion": {"sub_block_size": 2}})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "diffusion.sub_block_size"
            stream = await client.post("/v1/completions", json={**body, "stream": True})
            return [*said, stream.text]

    models, blocks, ar, lossless, threshold, stream = asyncio.run(talk())
    assert models["data"][0]["block_diffusion"] == {"block_size": BLOCK, "sub_block_size": BLOCK}
    assert [one["diffusion"]["mode"] for one in (blocks, ar, lossless, threshold)] == [
        "diffusion", "ar", "lossless", "diffusion"
    ]  # fmt: skip
    assert lossless["choices"][0]["text"] == ar["choices"][0]["text"]
    assert sum(blocks["diffusion"]["steps_per_block"]) == blocks["diffusion"]["forwards"]["denoise"]
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == blocks["choices"][0]["text"]


def test_over_http_blocks_are_refused_where_the_denoiser_is_absent(tower_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tower_folder, tmp_path / "towers"))
    shutil.rmtree(folder / "denoiser")
    app, _ = direct_app(folder, decode={"mode": "ar"})

    async def talk() -> tuple[Any, Any]:
        async with client_of(app) as client:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
            asked = [body, {**body, "diffusion": {"mode": "diffusion"}}]
            answers = [await client.post("/v1/completions", json=one) for one in asked]
            return answers[0], answers[1]

    told, refused = asyncio.run(talk())
    assert told.status_code == 200 and told.json()["usage"]["completion_tokens"] == 4
    assert refused.status_code == 400 and "TwoTower folder with a denoiser" in refused.json()["error"]["message"]
