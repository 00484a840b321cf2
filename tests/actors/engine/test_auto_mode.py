"""Mode "auto": the choice on numbers alone, and in the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from actors.engine.auto_mode import PRIOR_TPF, ModeChooser, RoundCosts, calibration_rows, interpolate
from actors.engine.calibration import measure_costs
from actors.engine.events import Event, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.decoding import Decoder
from tests.decoding import answer, make_request, prompt_of

# a round of blocks costs 1.2 rounds token by token while one row runs, and 4 with eight rows
COSTS = RoundCosts(ar={1: 1.0, 2: 1.0, 8: 2.0}, diffusion={1: 1.2, 2: 1.6, 8: 8.0})


def test_blocks_win_alone_and_lose_in_a_crowd() -> None:
    chooser = ModeChooser(COSTS)
    assert chooser.choose(100, rows=1) == "diffusion"
    assert chooser.choose(100, rows=2) == "diffusion"
    assert chooser.choose(100, rows=8) == "ar"
    assert chooser.choose(100, rows=800) == "ar"


def test_a_budget_of_one_token_is_decided_token_by_token() -> None:
    chooser = ModeChooser(COSTS)
    assert [chooser.choose(n, rows=1) for n in (1, 2, 3)] == ["ar", "diffusion", "diffusion"]


def test_what_answers_decide_a_forward_moves_the_choice() -> None:
    chooser = ModeChooser(COSTS)
    assert chooser.tokens_per_forward == PRIOR_TPF
    for _ in range(100):
        chooser.learn(completion_tokens=90, forwards=20)
    assert chooser.tokens_per_forward == pytest.approx(4.5, rel=0.01)
    assert chooser.choose(100, rows=8) == "diffusion"
    for _ in range(100):
        chooser.learn(completion_tokens=10, forwards=10)
    assert chooser.choose(100, rows=1) == "ar"
    chooser.learn(completion_tokens=3, forwards=0)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = {1: 1.0, 2: 2.0, 8: 5.0}
    assert [interpolate(costs, n) for n in (1, 2, 5, 8, 16)] == [1.0, 2.0, 3.5, 5.0, 10.0]


def test_powers_of_two_are_measured_and_the_last() -> None:
    assert calibration_rows(1) == [1]
    assert calibration_rows(8) == [1, 2, 4, 8]
    assert calibration_rows(12) == [1, 2, 4, 8, 12]


def test_calibration_measures_both_modes_and_leaves_nothing(sharp_backbone: Backbone) -> None:
    decoder = Decoder(sharp_backbone, rows=4)
    costs = measure_costs(decoder, [1, 2, 4])
    assert set(costs.ar) == set(costs.diffusion) == {1, 2, 4}
    assert all(seconds > 0 for seconds in (*costs.ar.values(), *costs.diffusion.values()))
    decoder.cache.pool.check()
    assert decoder.cache.pool.cached == 0


def test_the_engine_says_which_mode_it_chose_and_answers_in_it(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=2))
    for costs, mode in (({1: 1.0}, "ar"), ({1: 0.001}, "diffusion")):
        engine._chooser = ModeChooser(RoundCosts(ar={1: 0.1}, diffusion=costs))
        (result,) = generate_all(engine, [make_request("r", prompt_of(11), 20, mode="auto")])
        assert result.mode == mode
        assert result.token_ids == answer(sharp_backbone, make_request("r", prompt_of(11), 20, mode=mode)).token_ids


def test_the_choice_counts_those_who_wait(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=8))
    engine._chooser = ModeChooser(RoundCosts(ar={1: 1.0, 8: 1.0}, diffusion={1: 1.0, 8: 8.0}))
    results = generate_all(engine, [make_request(str(i), prompt_of(11), 20, mode="auto") for i in range(8)])
    assert {result.mode for result in results} == {"ar"}
    (alone,) = generate_all(engine, [make_request("alone", prompt_of(11), 20, mode="auto")])
    assert alone.mode == "diffusion"


def test_a_real_engine_measures_itself_when_it_is_first_asked(sharp_backbone: Backbone, tiny_model: object) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=2, max_length=64))
    (result,) = generate_all(engine, [make_request("r", prompt_of(11), 20, mode="auto")])
    assert result.mode in ("ar", "diffusion") and engine._chooser is not None
    engine.decoder.cache.pool.check()
    plain = Engine(load_backbone(str(tiny_model)))
    (result,) = generate_all(plain, [make_request("r", (20, 21), 4, mode="auto")])
    assert result.mode == "ar", "a model that was not adapted has no choice"


def test_an_auto_request_waits_for_the_pages_that_measuring_needs(sharp_backbone: Backbone) -> None:
    """It comes while another row holds all pages but one: neither may suffer."""
    engine = Engine(sharp_backbone, EngineConfig(max_rows=4, max_length=96, pages=12))
    ended: list[Event] = []
    engine.submit(make_request("holds", prompt_of(82), 14), ended.append)
    while engine.stats().pages_used < 11:
        engine.step()
    engine.submit(make_request("auto", prompt_of(3), 9, mode="auto"), ended.append)
    engine.step()
    assert engine._chooser is None and engine.stats().waiting == 1
    engine.run_until_idle()
    assert [event.id for event in ended if isinstance(event, Finished)] == ["holds", "auto"]
    assert engine._chooser is not None


def test_callers_may_submit_while_the_engine_measures(
    sharp_backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=2))
    submitted = threading.Event()

    def measure(decoder: Decoder, rows: list[int], each: Callable[[], None]) -> RoundCosts:
        other = threading.Thread(target=engine.submit, args=(make_request("b", prompt_of(3), 4), lambda event: None))
        other.start()
        other.join(10)
        if not other.is_alive():
            submitted.set()
        return COSTS

    monkeypatch.setattr("actors.engine.loop.measure_costs", measure)
    engine.submit(make_request("a", prompt_of(3), 4, mode="auto"), lambda event: None)
    engine.step()
    assert submitted.is_set(), "the lock was held"
    engine.run_until_idle()
