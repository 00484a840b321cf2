"""The backlog in query tokens: the arithmetic on numbers alone, then what a real engine says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.backlog import (
    HALVED_AT,
    UNKNOWN_COST,
    UNKNOWN_LENGTH,
    AnswerLengths,
    Backlog,
    BacklogMeter,
    TokenCost,
    Work,
)


def knowing(*lengths: int, remembered: int = 256) -> AnswerLengths:
    known = AnswerLengths(remembered)
    for length in lengths:
        known.learn(length)
    return known


def test_before_any_answer_has_finished_one_is_expected_to_be_of_middling_length() -> None:
    assert knowing().left(0, 10_000) == UNKNOWN_LENGTH
    assert knowing().left(0, 5) == 5
    assert knowing().left(40, 10_000) == 40, "as long again"


def test_an_answer_is_expected_to_end_like_those_that_were_longer_than_it_is_now() -> None:
    known = knowing(10, 20, 60)
    assert known.left(0, 1000) == 30
    assert known.left(15, 1000) == (5 + 45) / 2
    assert known.left(60, 1000) == 60, "no known answer was longer"


def test_no_more_is_expected_than_max_tokens_allow() -> None:
    known = knowing(10, 500, 700)
    assert known.left(0, 100) == (10 + 100 + 100) / 3
    assert known.left(40, 100) == 60
    assert known.left(100, 100) == 0


def test_old_answers_are_forgotten() -> None:
    known = knowing(*[1000] * 4, *[10] * 4, remembered=4)
    assert known.left(0, 10_000) == 10


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(0, 60), st.integers(1, 60), st.integers(1, 9))
def test_what_is_left_equals_a_plain_mean_over_the_longer_ones(
    lengths: list[int], answered: int, max_tokens: int, remembered: int
) -> None:
    longer = [min(n, max_tokens) - answered for n in lengths[-remembered:] if n > answered]
    found = knowing(*lengths, remembered=remembered).left(answered, max_tokens)
    assert 0 <= found <= max(0, max_tokens - answered)
    if longer and answered < max_tokens:
        assert found == pytest.approx(sum(longer) / len(longer))


def test_the_cost_of_a_token_is_measured_and_the_latest_count_most() -> None:
    cost = TokenCost()
    assert cost.value == UNKNOWN_COST
    for _ in range(4000):
        cost.learn(80, 8)
    assert cost.value == pytest.approx(10, rel=0.01)
    for _ in range(10 * HALVED_AT):
        cost.learn(1, 1)
    assert cost.value == pytest.approx(1, rel=0.01)


def test_the_backlog_is_the_prompts_to_encode_and_the_answers_at_what_they_cost() -> None:
    meter = BacklogMeter()
    meter.lengths.learn(50)
    cost = meter.cost.value
    assert meter.measure([]).tokens == 0
    works = [Work(prompt_left=1000, answered=0, max_tokens=20), Work(prompt_left=0, answered=30, max_tokens=400)]
    assert meter.measure(works).tokens == pytest.approx(1000 + (20 + 20) * cost)


def test_a_new_request_brings_its_uncached_prompt_and_an_answer_of_the_usual_length() -> None:
    backlog = Backlog(tokens=0, answer_length=100, token_cost=3)
    assert backlog.of_request(prompt_tokens=40, max_tokens=1000) == 340
    assert backlog.of_request(prompt_tokens=40, max_tokens=10) == 70


def test_the_arithmetic_needs_neither_torch_nor_ray() -> None:
    code = "import sys, actors.engine.backlog; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
