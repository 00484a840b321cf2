"""Reveal policies: what every one owes a row, and what each one promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.decoding.policies import POLICIES, RevealInputs, steps_of_sub_block


@st.composite
def inputs(draw: st.DrawFn) -> RevealInputs:
    """Rows of a block with at least one candidate each; equal confidences are common."""
    rows, slots = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    level = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
    confidence = draw(st.lists(st.lists(level, min_size=slots, max_size=slots), min_size=rows, max_size=rows))
    masks = st.lists(st.booleans(), min_size=slots, max_size=slots).filter(any)
    return RevealInputs(
        confidence=torch.tensor(confidence),
        candidates=torch.tensor(draw(st.lists(masks, min_size=rows, max_size=rows))),
        threshold=torch.tensor(draw(st.lists(st.sampled_from([0.05, 0.5, 0.9, 1.0]), min_size=rows, max_size=rows))),
        steps_left=torch.tensor(draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))),
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(case=inputs())
@settings(deadline=None, max_examples=60)
def test_every_policy_reveals_at_least_one_candidate_and_nothing_else(name: str, case: RevealInputs) -> None:
    revealed = POLICIES[name](case)
    assert revealed.dtype == torch.bool
    assert revealed.any(1).all()
    assert not (revealed & ~case.candidates).any()


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(case=inputs())
@settings(deadline=None, max_examples=30)
def test_a_row_is_revealed_alike_alone_and_among_others(name: str, case: RevealInputs) -> None:
    together = POLICIES[name](case)
    for i in range(len(together)):
        one = slice(i, i + 1)
        alone = RevealInputs(case.confidence[one], case.candidates[one], case.threshold[one], case.steps_left[one])
        assert torch.equal(POLICIES[name](alone), together[one])


def one_row(confidence: list[float], masked: list[bool], threshold: float = 0.9, steps_left: int = 1) -> RevealInputs:
    return RevealInputs(
        torch.tensor([confidence]), torch.tensor([masked]), torch.tensor([threshold]), torch.tensor([steps_left])
    )


def opened(name: str, case: RevealInputs) -> list[int]:
    revealed: Tensor = POLICIES[name](case)[0]
    return revealed.nonzero()[:, 0].tolist()


def test_threshold_opens_all_above_it_strictly_and_the_best_one_otherwise() -> None:
    masked = [True, True, False, True]
    assert opened("threshold", one_row([0.91, 0.9, 0.99, 0.95], masked)) == [0, 3]
    assert opened("threshold", one_row([0.2, 0.3, 0.99, 0.1], masked)) == [1]
    assert opened("threshold", one_row([0.3, 0.3, 0.99, 0.1], masked)) == [0]
    assert opened("threshold", one_row([1.0, 1.0, 1.0, 1.0], masked, threshold=1.0)) == [0]


def test_sequential_opens_the_leftmost() -> None:
    assert opened("sequential", one_row([0.1, 0.9, 0.2], [False, True, True])) == [1]
    assert opened("sequential", one_row([0.1, 0.2, 0.9], [False, True, True])) == [1]


def test_static_opens_its_share_of_the_most_confident() -> None:
    case = [0.1, 0.4, 0.3, 0.2, 0.9], [True, True, True, True, False]
    assert opened("static", one_row(*case, steps_left=2)) == [1, 2]
    assert opened("static", one_row(*case, steps_left=3)) == [1, 2]
    assert opened("static", one_row(*case, steps_left=4)) == [1]
    assert opened("static", one_row(*case, steps_left=1)) == [0, 1, 2, 3]


@given(masked=st.integers(1, 32), steps=st.integers(1, 40))
def test_static_ends_a_sub_block_within_its_steps(masked: int, steps: int) -> None:
    left, taken = masked, 0
    while left:
        left -= math.ceil(left / max(1, steps - taken))
        taken += 1
    assert taken <= min(steps, masked)


@given(steps=st.integers(1, 64), sub_blocks=st.integers(1, 8))
def test_a_block_s_steps_are_shared_over_its_sub_blocks(steps: int, sub_blocks: int) -> None:
    shares = [steps_of_sub_block(steps, i, sub_blocks) for i in range(sub_blocks)]
    assert sum(shares) == max(steps, sub_blocks), "none is lost, and every sub-block gets one"
    assert max(shares) - min(shares) <= 1
