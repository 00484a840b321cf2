"""Pages in the engine: rows that share, lose and get back their pages write what they write alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actors.engine.events import Delta, Event, Failed, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone
from model.decoding import GenerationRequest, GenerationResult
from model.errors import UserError
from tests.decoding import BLOCK, answer, make_request, mixed_requests, prompt_of, renamed
from tests.scripted import scripted_backbone

KINDS: list[dict[str, Any]] = [
    {},
    {"mode": "ar"},
    {"refresh": "sub_block"},
    {"refresh": "every:2"},
    {"temperature": 0.9, "seed": 3},
    {"fused": "masked_head"},
    {"fused": "speculative"},
    {"fused": "speculative", "refresh": "sub_block"},
    {"mode": "lossless", "fused": "speculative"},
    {"mode": "lossless", "fused": "speculative", "temperature": 1.3, "seed": 4},
]
ANYWHERE = KINDS[:-1]  # drawn lossless answers are only distributed alike where another engine continues them


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    return {result.id: result for result in generate_all(engine, requests)}


# ------------------------------------------------------------------------------------------------- preemption
@pytest.mark.parametrize("pages", [12, 14, 20])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_row_that_lost_its_pages_goes_on_exactly_where_it_was(
    sharp_backbone: Backbone, pages: int, prefix_cache: bool
) -> None:
    requests = mixed_requests()
    alone = {r.id: answer(sharp_backbone, r) for r in requests}
    config = EngineConfig(max_rows=6, max_length=12 * BLOCK, pages=pages, prefix_cache=prefix_cache)
    engine = Engine(sharp_backbone, config)
    results = run(engine, requests)
    assert engine.stats().preemptions > 0, "too many pages: nothing was tested"
    for name, result in results.items():
        assert result.token_ids == alone[name].token_ids
        assert result.steps_per_block == alone[name].steps_per_block
        assert result.text == alone[name].text


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("after", range(1, 16))
def test_a_preemption_after_any_round_changes_no_token(
    sharp_backbone: Backbone, kind: dict[str, Any], after: int
) -> None:
    request = make_request("r", prompt_of(BLOCK + 5), 30, **kind)
    expected = answer(sharp_backbone, request)
    engine = Engine(sharp_backbone, EngineConfig(max_rows=2, prefix_cache=False))
    ended: list[Event] = []
    engine.submit(request, ended.append)
    for _ in range(after):
        engine.step()
    if "r" in engine._rows:
        engine._preempt("r")
    engine.run_until_idle()
    assert isinstance(ended[-1], Finished)
    assert ended[-1].result.token_ids == expected.token_ids
    assert ended[-1].result.steps_per_block == expected.steps_per_block


def test_the_newest_row_gives_way_and_the_oldest_never_waits() -> None:
    engine = Engine(scripted_backbone(lambda p: (20 + p % 200, 0.1)), EngineConfig(max_rows=4, max_length=96, pages=14))
    told: list[str] = []
    for i in range(4):
        request = make_request(str(i), prompt_of(8), 80)
        engine.submit(request, lambda e: told.append(e.id) if isinstance(e, Finished) else None)
    engine.run_until_idle()
    assert told == ["0", "1", "2", "3"] and engine.stats().preemptions >= 2


def test_who_lost_its_pages_goes_on_before_those_who_never_ran() -> None:
    engine = Engine(scripted_backbone(lambda p: (20 + p % 200, 0.1)), EngineConfig(max_rows=2, max_length=96, pages=14))
    for i in range(3):
        engine.submit(make_request(str(i), prompt_of(8, i), 80), lambda e: None)
    while "2" not in engine._rows:
        assert engine.step()
    assert engine.stats().preemptions > 0
    assert next(iter(engine._rows)) == "1", "row 1 lost its pages, and got new ones before row 2 had any"
    engine.run_until_idle()


def test_a_row_begins_only_with_a_page_in_reserve_for_each_that_runs() -> None:
    """Else it would lose its pages to them in the next round, and encode its prompt for nothing."""
    engine = Engine(scripted_backbone(lambda p: (20 + p % 200, 0.1)), EngineConfig(max_rows=4, max_length=96, pages=12))
    engine.submit(make_request("old", prompt_of(56), 40), lambda e: None)
    engine.step()
    assert engine.stats().pages_used == 7
    engine.submit(make_request("new", prompt_of(32, 1), 8), lambda e: None)
    for _ in range(3):
        engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 1), "five pages for it and one for the other lack"
    engine.abort("new")
    engine.submit(make_request("smaller", prompt_of(16, 2), 8), lambda e: None)
    engine.step()
    assert engine.stats().running == 2
    engine.run_until_idle()


def test_pages_that_cannot_hold_one_row_are_refused(sharp_backbone: Backbone) -> None:
    with pytest.raises(UserError, match=r"pages 5 of 8 tokens do not hold one row of 96: give at least 12"):
        Engine(sharp_backbone, EngineConfig(max_length=96, pages=5))


# ------------------------------------------------------------------------------------------------- the prefix cache
@pytest.mark.parametrize("kind", ANYWHERE, ids=str)
@pytest.mark.parametrize("length", [1, BLOCK - 1, 2 * BLOCK])
def test_an_answer_that_another_engine_began_is_continued_with_the_same_tokens(
    sharp_backbone: Backbone, kind: dict[str, Any], length: int
) -> None:
    request = make_request("r", prompt_of(length), 3 * BLOCK, **kind)
    whole = answer(sharp_backbone, request)
    engine = Engine(sharp_backbone, EngineConfig(max_rows=1))
    for known in (1, BLOCK - 1, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3, 3 * BLOCK):
        taken_over = replace(request, answered=whole.token_ids[:known])
        heard: list[Event] = []
        engine.submit(taken_over, heard.append)
        engine.run_until_idle()
        (finished,) = (event.result for event in heard if isinstance(event, Finished))
        assert (finished.token_ids, finished.text) == (whole.token_ids, whole.text), known
        deltas = [event for event in heard if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == whole.text, "what is known is told again"
        if known > 2 * BLOCK + 1:
            assert finished.forwards["denoise"] + finished.forwards["commit"] < sum(
                whole.forwards[phase] for phase in ("denoise", "commit")
            )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 3, 5 * BLOCK + 1])
def test_a_known_prefix_is_not_encoded_again_and_changes_no_token(
    sharp_backbone: Backbone, kind: dict[str, Any], length: int
) -> None:
    request = make_request("first", prompt_of(length), 20, **kind)
    engine = Engine(sharp_backbone)
    first, again = (run(engine, [renamed(request, name)])[name] for name in ("first", "again"))
    assert replace(again, id="first", forwards=first.forwards, cached_tokens=0) == first
    whole = length // BLOCK * BLOCK - (BLOCK if length % BLOCK == 0 else 0)
    assert again.cached_tokens == whole, "the last logit of an aligned prompt must be computed"
    assert engine.stats().prefix_hits == whole // BLOCK


def test_an_answer_is_found_as_the_beginning_of_the_next_prompt(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    first = run(engine, [make_request("a", prompt_of(10), 40)])["a"]
    following = make_request("b", (*prompt_of(10), *first.token_ids, *prompt_of(6)), 20)
    second = run(engine, [following])["b"]
    assert second.cached_tokens >= 40, "whole committed blocks of the answer too"
    assert second.token_ids == answer(sharp_backbone, following).token_ids


def test_causal_and_block_causal_prefixes_are_never_mixed(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    block = make_request("block", prompt_of(33), 20)
    causal = make_request("causal", prompt_of(33), 20, mode="ar")
    results = [run(engine, [r])[r.id] for r in (block, causal, renamed(block, "b2"), renamed(causal, "c2"))]
    assert [r.cached_tokens for r in results] == [0, 0, 32, 32]
    assert results[0].token_ids == results[2].token_ids == answer(sharp_backbone, block).token_ids
    assert results[1].token_ids == results[3].token_ids == answer(sharp_backbone, causal).token_ids


def test_rows_that_run_together_share_the_pages_of_their_prompt(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=4))
    run(engine, [make_request("first", prompt_of(4 * BLOCK + 1), 1)])
    for i in range(4):
        engine.submit(make_request(str(i), prompt_of(4 * BLOCK + 1), 20, temperature=1.0, seed=i), lambda e: None)
    engine.step()
    assert engine.stats().pages_used <= 4 + 4 * 2, "one copy of the prompt, two blocks a row at most"
    engine.run_until_idle()
    assert engine.stats().pages_used == 0 and engine.stats().pages_cached > 0


@pytest.mark.parametrize("prefill_tokens", [BLOCK, 512])
def test_several_answers_to_one_prompt_encode_it_once(sharp_backbone: Backbone, prefill_tokens: int) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=4, prefill_tokens=prefill_tokens))
    prompt = prompt_of(6 * BLOCK + 3)
    asked = [make_request(str(i), prompt, 20, temperature=1.0, seed=i) for i in range(4)]
    results = run(engine, [asked[0], *(replace(request, follows="0") for request in asked[1:])])
    assert [results[str(i)].cached_tokens for i in range(4)] == [0, *[6 * BLOCK] * 3]
    assert len({result.token_ids for result in results.values()}) > 1
    for request in asked:
        assert results[request.id].token_ids == answer(sharp_backbone, request).token_ids


def test_who_follows_a_request_that_left_begins_without_it(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=1))
    ended: list[Event] = []
    engine.submit(make_request("leader", prompt_of(30), 5), ended.append)
    engine.submit(replace(make_request("follower", prompt_of(30), 5), follows="leader"), ended.append)
    engine.abort("leader")
    engine.run_until_idle()
    assert [event.id for event in ended if isinstance(event, Finished)] == ["follower"]
    (stranger,) = generate_all(engine, [replace(make_request("s", prompt_of(30), 5), follows="nobody")])
    assert stranger.completion_tokens == 5


def test_a_failed_row_s_pages_are_not_found() -> None:
    """Its committed blocks before the failure may be; what it was writing may not."""
    backbone = scripted_backbone(lambda p: (20 + p % 200, float("nan") if p > 30 else 0.9))
    engine = Engine(backbone)
    ended: list[Event] = []
    engine.submit(make_request("bad", prompt_of(20), 30), ended.append)
    engine.run_until_idle()
    assert isinstance(ended[-1], Failed)
    pool = engine.decoder.cache.pool
    pool.check()
    assert pool.cached == 3, "blocks at 0 and 8 of the prompt and the one at 16 that was committed"


@pytest.mark.slow
# ------------------------------------------------------------------------------------------------- under fire
@pytest.mark.parametrize("seed", range(2))
def test_two_thousand_random_submits_and_aborts_leave_every_page_free(seed: int) -> None:
    chance = random.Random(seed)
    config = EngineConfig(max_rows=4, max_length=96, pages=16, prefill_tokens=16)
    engine = Engine(scripted_backbone(lambda p: (20 + p % 7, chance.random()), context_length=96), config)
    ended: dict[str, Event] = {}
    alive: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ended[event.id] = event

    for i in range(2000):
        kind = chance.choice(KINDS)
        request = make_request(str(i), prompt_of(chance.randrange(1, 50), chance.randrange(3)), 1, **kind)
        engine.submit(replace(request, max_tokens=chance.randrange(1, 45)), listen)
        alive.append(str(i))
        if chance.random() < 0.5:
            gone = alive.pop(chance.randrange(len(alive)))
            engine.abort(gone)
        for _ in range(chance.randrange(4)):
            engine.step()
        engine.decoder.cache.pool.check([page for row in engine._rows.values() for page in row.pages])
    engine.run_until_idle()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == 16 and stats.preemptions > 0 and stats.prefix_hits > 0
    assert all(isinstance(ended[name], Finished) for name in alive)


# ------------------------------------------------------------------------------------------------- where pages lie
@pytest.mark.parametrize("kernels", [True, False])
def test_scattered_pages_give_what_pages_in_order_give(sharp_backbone: Backbone, kernels: bool) -> None:
    requests = mixed_requests()
    in_order, scattered = (Engine(sharp_backbone, EngineConfig(kernels=kernels, prefix_cache=False)) for _ in range(2))
    random.Random(0).shuffle(scattered.decoder.cache.pool._free)
    first, second = ({n: r.token_ids for n, r in run(engine, requests).items()} for engine in (in_order, scattered))
    assert first == second


def test_our_forward_writes_what_pytorch_s_writes(sharp_backbone: Backbone) -> None:
    """float32, every kind of row; the tiny model's margins are wide enough for rounding never to decide."""
    requests = mixed_requests()
    ours, theirs = Engine(sharp_backbone), Engine(sharp_backbone, EngineConfig(kernels=False))
    assert ours.decoder.fused is not None and theirs.decoder.fused is None
    first, second = ({n: r.token_ids for n, r in run(engine, requests).items()} for engine in (ours, theirs))
    assert first == second


# ------------------------------------------------------------------------------------------------- bounds
@pytest.mark.parametrize("seed", range(3))
def test_no_block_takes_more_forwards_than_slots_and_a_commit_and_everybody_ends(seed: int) -> None:
    """Whatever the confidences and however few the pages: no livelock, no starvation."""
    chance = random.Random(seed)
    backbone = scripted_backbone(lambda p: (20 + p % 200, chance.random()), context_length=96)
    engine = Engine(backbone, EngineConfig(max_rows=4, max_length=96, pages=13, prefill_tokens=8))
    requests = [
        make_request(str(i), prompt_of(chance.randrange(1, 60), i), 30, **{"threshold": 0.5, **chance.choice(KINDS)})
        for i in range(30)
    ]
    results = run(engine, requests)
    assert len(results) == 30
    for request in requests:
        result = results[request.id]
        if result.mode == "diffusion":
            blocks = len(result.steps_per_block) + 1
            assert max(result.steps_per_block, default=0) <= BLOCK
            assert result.forwards["denoise"] + result.forwards["commit"] <= blocks * (BLOCK + 1)
