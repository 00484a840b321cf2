"""When things happened to a request in the engine: told in order, once, and whatever way the request ended."""

from __future__ import annotations

from itertools import pairwise

import pytest

from actors.engine.events import Event, Failed, Finished
from actors.engine.loop import Engine, EngineConfig
from actors.engine.timeline import Timeline
from model.backbone import Backbone
from model.decoding import GenerationRequest
from tests.decoding import make_request, mixed_requests, prompt_of
from tests.scripted import scripted_backbone


def ends_of(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Finished | Failed]:
    """The last event of each request, all run together."""
    ends: dict[str, Finished | Failed] = {}

    def listen(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            assert event.id not in ends
            ends[event.id] = event

    for request in requests:
        engine.submit(request, listen)
    engine.run_until_idle()
    return ends


def in_order(timeline: Timeline) -> None:
    begun, prefilled = timeline.begun_ns, timeline.prefilled_ns
    assert begun is not None and prefilled is not None
    assert timeline.queued_ns <= begun <= prefilled <= timeline.ended_ns
    assert all(begun <= block.begin_ns < block.end_ns <= timeline.ended_ns for block in timeline.blocks)
    assert all(one.begin_ns < other.begin_ns and one.end_ns < other.end_ns for one, other in pairwise(timeline.blocks))


def test_every_block_of_every_kind_of_row_is_told_once_with_its_steps(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(max_rows=4, prefill_tokens=16))
    ends = ends_of(engine, mixed_requests())
    for end in ends.values():
        assert isinstance(end, Finished) and end.timeline is not None
        in_order(end.timeline)
        assert [block.steps for block in end.timeline.blocks] == end.result.steps_per_block
    assert engine._timelines._open == {}, "nothing is kept of a request that has ended"


def test_separate_commits_leave_blocks_side_by_side_and_fused_ones_overlap_by_a_round(sharp_backbone: Backbone) -> None:
    def overlaps(fused: str) -> bool:
        engine = Engine(sharp_backbone)
        end = ends_of(engine, [make_request("r", prompt_of(5), 60, fused=fused)])["r"]
        assert end.timeline is not None and len(end.timeline.blocks) > 5
        return any(other.begin_ns < one.end_ns for one, other in pairwise(end.timeline.blocks))

    assert not overlaps("off") and overlaps("masked_head")


def test_a_row_decoded_token_by_token_has_no_blocks(sharp_backbone: Backbone) -> None:
    end = ends_of(Engine(sharp_backbone), [make_request("r", prompt_of(9), 12, mode="ar")])["r"]
    assert end.timeline is not None and end.timeline.blocks == ()
    in_order(end.timeline)


def test_who_waits_for_a_row_has_waited_as_long_as_the_other_ran(sharp_backbone: Backbone) -> None:
    ends = ends_of(
        Engine(sharp_backbone, EngineConfig(max_rows=1)), [make_request(name, prompt_of(9), 20) for name in "ab"]
    )
    first, second = (ends[name].timeline for name in "ab")
    assert first is not None and second is not None
    assert second.begun_ns is not None and second.begun_ns >= first.ended_ns
    assert second.queue_s >= first.ended_ns / 1e9 - second.queued_ns / 1e9 - 1e-6 > 0


def test_a_row_that_lost_its_pages_began_once_and_says_how_often_it_lost_them() -> None:
    hard = scripted_backbone(lambda position: (20 + position % 200, 0.1))
    engine = Engine(hard, EngineConfig(max_rows=4, max_length=96, pages=14))
    ends = ends_of(engine, [make_request(str(i), prompt_of(8), 80) for i in range(4)])
    timelines = [end.timeline for end in ends.values()]
    assert all(timeline is not None for timeline in timelines)
    lost = sum(timeline.preemptions for timeline in timelines if timeline is not None)
    assert lost == engine.stats().preemptions >= 2
    for timeline in timelines:
        assert timeline is not None
        in_order(timeline)


def test_a_request_that_failed_tells_how_far_it_came_and_an_aborted_one_leaves_nothing() -> None:
    nan = scripted_backbone(lambda position: (20, float("nan") if position >= 24 else 0.99))
    engine = Engine(nan)
    end = ends_of(engine, [make_request("r", prompt_of(8), 40)])["r"]
    assert isinstance(end, Failed) and end.timeline is not None
    in_order(end.timeline)
    assert len(end.timeline.blocks) == 1, "the forward that would have committed the second block failed"
    engine.submit(make_request("gone", prompt_of(8), 40), lambda event: None)
    engine.step()
    engine.abort("gone")
    engine.run_until_idle()
    assert engine._timelines._open == {}


def test_an_engine_that_stops_tells_when(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone)
    heard: list[Event] = []
    engine.submit(make_request("r", prompt_of(8), 40), heard.append)
    engine._close("It stops.")
    (end,) = heard
    assert isinstance(end, Failed) and end.timeline is not None and end.timeline.begun_ns is None
    assert end.timeline.queue_s == pytest.approx((end.timeline.ended_ns - end.timeline.queued_ns) / 1e9)
