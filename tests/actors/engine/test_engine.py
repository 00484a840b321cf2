"""The engine loop: who waits for whom, what callers hear, and that nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from actors.engine.events import Canvas, Delta, Event, Failed, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.decoding import GenerationRequest
from model.errors import JobError, UserError
from tests.decoding import BLOCK, answer, make_request, prompt_of, renamed
from tests.scripted import scripted_backbone

EASY, HARD = 0.99, 0.1
HARD_FROM = 512  # scripted: positions from here on open one a step


def script(position: int) -> tuple[int, float]:
    return 20 + position % 200, HARD if position >= HARD_FROM else EASY


class Listener:
    """Collects events by request; knows in which round each one came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[str, list[Event]] = {}
        self.rounds: dict[str, list[int]] = {}

    def __call__(self, event: Event) -> None:
        self.events.setdefault(event.id, []).append(event)
        self.rounds.setdefault(event.id, []).append(self.engine.stats().rounds)

    def result(self, name: str) -> Finished:
        last = self.events[name][-1]
        assert isinstance(last, Finished), last
        return last


# ------------------------------------------------------------------------------------------------- at its own pace
def rounds_until_finished(requests: list[GenerationRequest], name: str, **config: int) -> int:
    engine = Engine(scripted_backbone(script), EngineConfig(**config))
    listener = Listener(engine)
    for request in requests:
        engine.submit(request, listener)
    engine.run_until_idle()
    return listener.rounds[name][-1]


def test_an_easy_row_s_finish_does_not_depend_on_hard_neighbours() -> None:
    easy = make_request("easy", prompt_of(5), 40)
    hard = [make_request(f"hard{i}", prompt_of(HARD_FROM), 40) for i in range(4)]
    alone = rounds_until_finished([easy], "easy")
    assert alone < rounds_until_finished([hard[0]], "hard0")
    assert rounds_until_finished([*hard, easy], "easy") == alone
    assert rounds_until_finished([easy, *hard], "easy") == alone


def test_scripted_confidences_open_exactly_what_they_say() -> None:
    engine = Engine(scripted_backbone(script))
    easy, hard = generate_all(
        engine, [make_request("e", prompt_of(BLOCK), 2 * BLOCK), make_request("h", prompt_of(HARD_FROM), 2 * BLOCK)]
    )
    assert easy.steps_per_block == [2, 2], "one step a sub-block"
    assert hard.steps_per_block == [BLOCK - 1, BLOCK - 1], "one step a slot, the first is free"
    assert easy.token_ids == tuple(20 + p % 200 for p in range(BLOCK, 3 * BLOCK))
    assert easy.forwards == {"prefill": 1, "denoise": 4, "commit": 1}
    assert easy.tokens_per_forward == pytest.approx(16 / 5)


def test_a_stream_of_long_prompts_stretches_no_round_beyond_the_budget() -> None:
    backbone = scripted_backbone(script)
    engine = Engine(backbone, EngineConfig(max_rows=8, prefill_tokens=64))
    listener = Listener(engine)
    engine.submit(make_request("talks", prompt_of(3), 100, trace=True), listener)
    engine.step()
    backbone.model.forwards.clear()
    arrivals = iter(range(1000))
    while not isinstance(listener.events["talks"][-1], Finished):
        engine.submit(make_request(f"long{next(arrivals)}", prompt_of(400), 1), lambda event: None)
        engine.step()
    assert max(backbone.model.forwards) <= 64 + 8 * BLOCK
    rounds = [
        r for r, e in zip(listener.rounds["talks"], listener.events["talks"], strict=True) if isinstance(e, Canvas)
    ]
    assert max(b - a for a, b in pairwise(rounds)) <= 2, "a commit may lie between two steps"


def test_rows_join_and_leave_while_others_run() -> None:
    engine = Engine(scripted_backbone(script), EngineConfig(max_rows=2))
    listener = Listener(engine)
    for i, length in enumerate((40, 8, 8, 8)):
        engine.submit(make_request(str(i), prompt_of(3), length), listener)
    engine.run_until_idle()
    ends = [listener.rounds[str(i)][-1] for i in range(4)]
    assert ends[1] < ends[2] < ends[3] < ends[0], "three short answers passed through the second slot"


# ------------------------------------------------------------------------------------------------- what callers hear
def test_deltas_add_up_to_the_result_and_are_cut_at_sub_blocks(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    listener = Listener(engine)
    for i, kind in enumerate(({}, {"mode": "ar"}, {"temperature": 1.0}, {"sub_block_size": 8})):
        engine.submit(make_request(str(i), prompt_of(10 + i), 37, **kind), listener)
    engine.run_until_idle()
    for i, sub_block in enumerate((4, 1, 4, 8)):
        result = listener.result(str(i)).result
        deltas = [e for e in listener.events[str(i)] if isinstance(e, Delta)]
        assert tuple(t for d in deltas for t in d.token_ids) == result.token_ids
        assert "".join(d.text for d in deltas) == result.text
        position = 10 + i
        for delta in deltas[:-1]:
            position += len(delta.token_ids)
            assert position % sub_block == 0


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    for kind in ({}, {"mode": "ar"}, {"threshold": 0.2, "sub_block_size": 8}):
        whole = answer(sharp_backbone, make_request("r", prompt_of(13), 30, **kind))
        decode = sharp_backbone.tokenizer.decode
        for begin in range(0, len(whole.text) - 3, 5):
            stop = whole.text[begin : begin + 2]
            if "\ufffd" in stop:
                continue
            listener = Listener(engine)
            name = f"{kind}{begin}"
            engine.submit(
                replace(make_request(name, prompt_of(13), 30, **kind), stop_strings=(stop, "never")), listener
            )
            engine.run_until_idle()
            result = listener.result(name).result
            assert result.text == whole.text[: whole.text.find(stop)]
            assert result.finish_reason == "stop"
            assert result.token_ids == whole.token_ids[: result.completion_tokens]
            assert stop in decode(result.token_ids) and stop not in decode(result.token_ids[:-1])
            shown = ""
            for event in listener.events[name]:
                if isinstance(event, Delta):
                    shown += event.text
                    assert result.text.startswith(shown)
            assert shown == result.text


def test_a_special_token_given_as_a_stop_string_stops(sharp_backbone: Backbone) -> None:
    backbone = scripted_backbone(lambda p: (9 if p == 13 else 20 + p % 200, EASY))
    (result,) = generate_all(
        Engine(backbone), [replace(make_request("r", prompt_of(10), 30), stop_strings=("<|spare_6|>",))]
    )
    assert result.finish_reason == "stop" and result.token_ids[-1] == 9 and result.completion_tokens == 4
    assert result.text == backbone.tokenizer.decode(result.token_ids[:-1])


def test_the_stop_token_counts_and_does_not_show(sharp_backbone: Backbone) -> None:
    whole = answer(sharp_backbone, make_request("r", prompt_of(13), 30))
    stop = whole.token_ids[7]
    result = answer(sharp_backbone, make_request("r", prompt_of(13), 30, stop=[stop]))
    assert result.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert result.text == sharp_backbone.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)


def test_ids_in_use_are_refused_until_the_request_has_ended(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    request = make_request("twice", prompt_of(5), 4)
    engine.submit(request, lambda event: None)
    with pytest.raises(UserError, match="'twice' is in use"):
        engine.submit(request, lambda event: None)
    engine.run_until_idle()
    engine.submit(request, lambda event: None)
    engine.run_until_idle()


# ------------------------------------------------------------------------------------------------- leaving, failing
def test_an_abort_frees_its_place_before_the_next_round(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=1))
    listener = Listener(engine)
    engine.submit(make_request("leaves", prompt_of(5), 200), listener)
    engine.submit(make_request("waits", prompt_of(9), 6), listener)
    for _ in range(3):
        engine.step()
    engine.abort("leaves")
    engine.abort("unknown")
    heard = len(listener.events.get("leaves", []))
    engine.run_until_idle()
    assert len(listener.events.get("leaves", [])) == heard
    assert (
        listener.result("waits").result.token_ids
        == answer(sharp_backbone, make_request("r", prompt_of(9), 6)).token_ids
    )


@pytest.mark.parametrize("seed", range(2))
def test_random_submits_and_aborts_leave_no_page_used(seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine(scripted_backbone(script), EngineConfig(max_rows=3, prefill_tokens=16))
    listener = Listener(engine)
    alive: list[str] = []
    for i in range(300):
        if chance.random() < 0.5:
            mode = chance.choice(["ar", "diffusion"])
            engine.submit(
                make_request(str(i), prompt_of(chance.randrange(1, 40)), chance.randrange(1, 30), mode=mode), listener
            )
            alive.append(str(i))
        if alive and chance.random() < 0.3:
            engine.abort(alive.pop(chance.randrange(len(alive))))
        if chance.random() < 0.7:
            engine.step()
        pool = engine.decoder.cache.pool
        pool.check([page for row in engine._rows.values() for page in row.pages])
        stats = engine.stats()
        assert stats.pages_used + stats.pages_cached + stats.pages_free == pool.total
    engine.run_until_idle()
    assert not engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    for name in alive:
        assert isinstance(listener.events[name][-1], Finished)


def test_bad_logits_fail_their_request_and_no_other(tmp_path: object, sharp_backbone: Backbone) -> None:
    """A prompt with a damaged embedding row makes NaN; the rows beside it must not notice."""
    damaged = load_backbone(sharp_backbone.name)
    bad = 50
    damaged.model.config.tie_word_embeddings = False
    damaged.model.lm_head.weight = torch.nn.Parameter(damaged.model.lm_head.weight.detach().clone())
    with torch.no_grad():
        damaged.model.get_input_embeddings().weight[bad] = torch.nan
    good = make_request("good", [t if t != bad else bad + 1 for t in prompt_of(12)], 20)
    expected = answer(sharp_backbone, good)
    engine = Engine(damaged)
    listener = Listener(engine)
    for request in (make_request("bad", (20, bad, 21), 20), good, make_request("bad ar", (bad, 21), 20, mode="ar")):
        engine.submit(request, listener)
    engine.run_until_idle()
    for name in ("bad", "bad ar"):
        failed = listener.events[name][-1]
        assert isinstance(failed, Failed) and "not finite" in failed.message
    assert bad not in expected.token_ids, "the good row must not come upon the damaged token by itself"
    assert listener.result("good").result.token_ids == expected.token_ids
    again = renamed(good, "again")
    assert generate_all(engine, [again])[0].token_ids == expected.token_ids, "the slots are as good as new"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no memory left for 3 GiB\nand details"), "no memory left for 3 GiB"),
        (MemoryError(), "MemoryError"),  # of NumPy and of the kernels
    ],
)
def test_a_forward_that_raises_fails_its_rows_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    backbone = scripted_backbone(script)
    engine = Engine(backbone)
    listener = Listener(engine)
    engine.submit(make_request("unlucky", prompt_of(5), 20), listener)
    with monkeypatch.context() as patched:

        def out_of_memory(*_: object, **__: object) -> None:
            raise error

        patched.setattr(backbone.model, "forward", out_of_memory)
        engine.step()
    failed = listener.events["unlucky"][-1]
    assert isinstance(failed, Failed) and failed.message == f"The forward failed: {message}"
    assert engine.stats().pages_used == 0
    assert generate_all(engine, [make_request("lucky", prompt_of(5), 20)])[0].completion_tokens == 20


@pytest.mark.parametrize("follows", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "c", "b": "a", "c": "b"}])
def test_who_follows_itself_in_the_end_does_not_wait_for_ever(follows: dict[str, str]) -> None:
    engine = Engine(scripted_backbone(script))
    listener = Listener(engine)
    for name, leader in follows.items():
        engine.submit(make_request(name, prompt_of(5), 9, follows=leader), listener)
    engine.run_until_idle()
    assert engine.stats().waiting == 0
    assert all(isinstance(listener.events[name][-1], Finished) for name in follows)


# ------------------------------------------------------------------------------------------------- its own thread
def test_many_threads_may_submit_to_a_running_engine(sharp_backbone: Backbone) -> None:
    requests = [make_request(f"t{i}", prompt_of(3 + i), 10 + i) for i in range(12)]
    expected = {r.id: r.token_ids for r in generate_all(Engine(sharp_backbone), requests)}
    engine = Engine(sharp_backbone, EngineConfig(max_rows=4))
    engine.start()
    results: dict[str, tuple[int, ...]] = {}

    def call(request: GenerationRequest) -> None:
        results[request.id] = generate_all(engine, [request])[0].token_ids

    threads = [threading.Thread(target=call, args=(r,)) for r in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == expected
    before = engine.progress_at
    deadline = time.monotonic() + 10
    while engine.progress_at == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.progress_at > before, "an idle engine still looks around"
    engine.stop()
    assert not engine.alive


def test_stopping_fails_what_has_not_ended_and_takes_no_more(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=1))
    ended: list[Event] = []
    for name in ("a", "b"):
        engine.submit(make_request(name, prompt_of(5), 400, threshold=1.0), ended.append)
    engine.start()
    engine.stop()
    failed = [e for e in ended if isinstance(e, Failed)]
    assert {e.id for e in failed} == {"a", "b"} and "stopped before" in failed[0].message
    with pytest.raises(JobError, match="has stopped"):
        engine.submit(make_request("c", prompt_of(5), 4), ended.append)
    assert engine.stats().pages_used == 0


def test_results_come_in_order_and_are_told_as_they_finish() -> None:
    engine = Engine(scripted_backbone(script))
    told: list[str] = []
    requests = [make_request("long", prompt_of(3), 60), make_request("short", prompt_of(3), 4)]
    results = generate_all(engine, requests, on_result=lambda r: told.append(r.id))
    assert [r.id for r in results] == ["long", "short"]
    assert told == ["short", "long"]
    stats = engine.stats()
    assert stats.forwards["denoise"] == sum(r.forwards["denoise"] for r in results)
    assert stats.committed_tokens > 0 and stats.round_s > 0


@pytest.mark.parametrize("visit", [2, 5])
def test_several_rounds_a_visit_change_no_answer_and_let_an_abort_in_at_the_next_visit(
    sharp_backbone: Backbone, visit: int
) -> None:
    requests = [make_request(str(i), prompt_of(9 + i), 20 + i, seed=i, temperature=0.8) for i in range(5)]
    expected = {r.id: r.token_ids for r in generate_all(Engine(sharp_backbone, EngineConfig(max_rows=2)), requests)}
    engine = Engine(sharp_backbone, EngineConfig(max_rows=2, rounds_per_visit=visit))
    assert {r.id: r.token_ids for r in generate_all(engine, requests)} == expected
    engine.submit(make_request("leaves", prompt_of(5), 200, threshold=1.0), lambda event: None)
    rounds = engine.stats().rounds
    engine.step()
    assert engine.stats().rounds == rounds + visit
    engine.abort("leaves")
    engine.step()
    assert (engine.stats().rounds, engine.stats().pages_used) == (rounds + visit, 0)
