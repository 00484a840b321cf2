"""What a real engine says of its backlog: it falls to zero as it works, and learns what its answers cost."""

from __future__ import annotations

import pytest

from actors.engine.backlog import UNKNOWN_COST, UNKNOWN_LENGTH
from actors.engine.events import Event
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone
from tests.decoding import BLOCK, make_request, prompt_of


def deaf(event: Event) -> None:
    pass


def test_waiting_and_running_requests_count_and_the_backlog_falls_to_zero(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=1, prefill_tokens=BLOCK))
    assert engine.backlog().tokens == 0
    for name in ("a", "b"):
        engine.submit(make_request(name, prompt_of(5 * BLOCK), 6), deaf)
    assert engine.backlog().tokens == pytest.approx(2 * (5 * BLOCK + 6 * UNKNOWN_COST))
    seen = [engine.backlog().tokens]
    while engine.step():
        seen.append(engine.backlog().tokens)
    assert seen[1] == pytest.approx(seen[0] - BLOCK), "one block of the first prompt is encoded"
    assert seen[-1] == 0


def test_an_aborted_request_is_no_longer_counted(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    engine.submit(make_request("a", prompt_of(40), 100), deaf)
    engine.step()
    engine.abort("a")
    engine.step()
    assert engine.backlog().tokens == 0


def test_a_preempted_row_must_be_encoded_again(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=2, pages=6, max_length=6 * BLOCK, prefix_cache=False))
    for name in ("a", "b"):
        engine.submit(make_request(name, prompt_of(2 * BLOCK), 4 * BLOCK), deaf)
    while not engine.stats().preemptions:
        assert engine.step()
    backlog = engine.backlog()
    assert backlog.tokens > 2 * BLOCK, "the prompt of the preempted row and two answers"
    engine.run_until_idle()
    assert engine.backlog().tokens == 0


def test_lengths_and_costs_are_learned_from_what_ran(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    assert engine.backlog().answer_length == UNKNOWN_LENGTH
    generate_all(engine, [make_request(f"r{i}", prompt_of(9, i), 3 * BLOCK, mode="ar") for i in range(30)])
    learned = engine.backlog()
    assert learned.answer_length == 3 * BLOCK
    assert 1 < learned.token_cost < UNKNOWN_COST, "one query token a token, and what was assumed before"
    generate_all(engine, [make_request(f"d{i}", prompt_of(9, i), 3 * BLOCK, policy="sequential") for i in range(30)])
    assert engine.backlog().token_cost > learned.token_cost, "blocks are run once for each of their tokens"
