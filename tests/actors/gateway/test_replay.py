"""A second run goes on exactly where the client is, or says that it cannot."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.events import Canvas, Delta, Event, Failed, Finished
from actors.gateway.replay import Replay
from model.decoding import GenerationResult, TokenLogprob
from model.errors import JobError

TOKENS = tuple(range(10, 22))
TEXT = "abcdefghijkl"


def result(tokens: tuple[int, ...] = TOKENS, text: str = TEXT) -> GenerationResult:
    forwards = {"prefill": 1, "denoise": 3, "commit": 1}
    return GenerationResult(
        id="r~1", token_ids=tokens, text=text, finish_reason="stop", prompt_tokens=3, forwards=forwards
    )


def deltas(cuts: list[int], late: int = 0) -> list[Delta]:
    """The answer in pieces; the text lags `late` characters behind its tokens until the end."""
    edges = [0, *sorted(set(cuts)), len(TOKENS)]
    events, shown = [], 0
    for start, end in itertools.pairwise(edges):
        final = len(TEXT) if end == len(TOKENS) else max(0, end - late)
        logprobs = tuple(TokenLogprob(float(t)) for t in TOKENS[start:end])
        events.append(Delta("r~1", TOKENS[start:end], TEXT[shown : max(shown, final)], logprobs))
        shown = max(shown, final)
    return events


def take(replay: Replay, events: list[Event]) -> list[Any]:
    replay.begin()
    return [passed for event in events if (passed := replay.pass_on(event)) is not None]


cuts = st.lists(st.integers(1, len(TOKENS) - 1), max_size=6)


@settings(deadline=None)  # a busy machine is no defect
@given(first=cuts, lost=st.integers(0, 7), second=cuts, third=cuts, late=st.integers(0, 3))
def test_the_client_sees_one_answer_however_often_it_was_begun(
    first: list[int], lost: int, second: list[int], third: list[int], late: int
) -> None:
    replay = Replay("r")
    seen = take(replay, list(deltas(first, late)[:lost]))
    seen += take(replay, list(deltas(second, late)[:1]))
    seen += take(replay, [*deltas(third, late), Finished(result())])
    pieces = [event for event in seen if isinstance(event, Delta)]
    assert tuple(t for piece in pieces for t in piece.token_ids) == TOKENS
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [p.logprob for piece in pieces for p in piece.logprobs or ()] == [float(t) for t in TOKENS]
    assert {event.id for event in seen} == {"r"} and isinstance(seen[-1], Finished)


@pytest.mark.parametrize(
    "other",
    [
        Delta("r", (10, 99), "ab"),
        Delta("r", (10, 11), "aX"),
        Finished(result(tokens=(10,), text="a")),
        Finished(result(text="aX")),
    ],
)
def test_a_run_that_differs_is_an_error_never_a_wrong_word(other: Event) -> None:
    replay = Replay("r")
    take(replay, [Delta("r", (10, 11), "ab")])
    replay.begin()
    with pytest.raises(JobError, match="continued it differently"):
        replay.pass_on(other)


def test_canvases_of_what_was_seen_already_are_left_out() -> None:
    replay = Replay("r")
    canvas = Canvas("r~1", 0, (), block_size=8, sub_block_size=4, prompt_tokens=3)
    assert take(replay, [canvas, Delta("r", (10, 11), "ab"), canvas]) == [
        replace(canvas, id="r"),
        Delta("r", (10, 11), "ab"),
        replace(canvas, id="r"),
    ]
    again = take(replay, [canvas, Delta("r~1", (10, 11), "ab"), canvas, Failed("r~1", "no")])
    assert again == [replace(canvas, id="r"), Failed("r", "no")]
