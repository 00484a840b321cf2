"""A request alone equals the same request in any company: batches, orders, padding, prompt chunks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model.decoding.packing as packing
from actors.engine.events import Event
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone
from tests.decoding import (
    BLOCK,
    answer,
    answers,
    make_request,
    mixed_requests,
    prompt_of,
)


@pytest.fixture(scope="module")
def alone(sharp_backbone: Backbone) -> dict[str, tuple[int, ...]]:
    return {r.id: answer(sharp_backbone, r).token_ids for r in mixed_requests()}


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_request_alone_equals_the_same_request_in_a_batch(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]], rows: int
) -> None:
    assert answers(sharp_backbone, mixed_requests(), max_rows=rows) == alone


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_arrival_changes_no_answer(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]], seed: int
) -> None:
    requests = mixed_requests()
    random.Random(seed).shuffle(requests)
    assert answers(sharp_backbone, requests, max_rows=4) == alone


@pytest.mark.parametrize("wait", [1, 2, 5])
def test_joining_a_running_batch_changes_no_answer(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]], wait: int
) -> None:
    engine = Engine(sharp_backbone)
    results: dict[str, tuple[int, ...]] = {}

    def listen(event: Event) -> None:
        if hasattr(event, "result"):
            results[event.id] = event.result.token_ids

    for request in mixed_requests():
        engine.submit(request, listen)
        for _ in range(wait):
            engine.step()
    engine.run_until_idle()
    assert results == alone


@pytest.mark.slow
def test_neighbours_to_the_left_or_right_change_no_answer(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]]
) -> None:
    engine = Engine(sharp_backbone)
    neighbour = make_request("neighbour", prompt_of(30, 99), 30)
    for request in mixed_requests():
        for pair in ([neighbour, request], [request, neighbour]):
            given = {r.id: r.token_ids for r in generate_all(engine, pair)}
            assert given[request.id] == alone[request.id]


@pytest.mark.parametrize("round_to", [8, 64])
def test_padding_changes_no_answer(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]], round_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "ROUND_TO", round_to)
    assert {r.id: answer(sharp_backbone, r).token_ids for r in mixed_requests()} == alone


@pytest.mark.parametrize("budget", [1, BLOCK, 3 * BLOCK, 3 * BLOCK + 5])
def test_chunked_prefill_changes_no_answer(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]], budget: int
) -> None:
    assert answers(sharp_backbone, mixed_requests(), prefill_tokens=budget) == alone


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 6), budget=st.integers(1, 64))
@settings(deadline=None, max_examples=5)
def test_any_arrivals_rows_and_budgets_give_the_same_answers(
    sharp_backbone: Backbone, alone: dict[str, tuple[int, ...]], seed: int, rows: int, budget: int
) -> None:
    chance = random.Random(seed)
    requests = mixed_requests()
    chance.shuffle(requests)
    engine = Engine(sharp_backbone, EngineConfig(max_rows=rows, prefill_tokens=budget))
    results: dict[str, tuple[int, ...]] = {}

    def listen(event: Event) -> None:
        if hasattr(event, "result"):
            results[event.id] = event.result.token_ids

    for request in requests:
        engine.submit(request, listen)
        for _ in range(chance.randrange(4)):
            engine.step()
    engine.run_until_idle()
    assert results == alone


def test_a_smaller_budget_gives_the_beginning_of_the_same_answer(sharp_backbone: Backbone) -> None:
    for kind in ({}, {"mode": "ar"}, {"temperature": 1.0, "seed": 3}):
        requests = [make_request(str(budget), prompt_of(13), budget, **kind) for budget in range(1, 27)]
        given = answers(sharp_backbone, requests, max_rows=26)
        assert all(given[str(budget)] == given["26"][:budget] for budget in range(1, 27))
