"""Reveal policies: what every one owes a row, and what each one promises."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.config import DecodeConfig
from model.decoding.policies import PARAMETERS, POLICIES, RevealInputs, check_policy, steps_of_sub_block
from model.errors import UserError

LEVELS = {
    "threshold": [0.05, 0.5, 0.9, 1.0],
    "gamma": [0.0, 0.05, 0.5, 0.95, 1.0],
    "factor": [0.01, 0.5, 1.0, 3.0, 50.0],
    "budget": [0.01, 0.2, 0.5, 2.0, 50.0],
}


def row_values(levels: list[float], rows: int) -> st.SearchStrategy[Tensor]:
    return st.lists(st.sampled_from(levels), min_size=rows, max_size=rows).map(torch.tensor)


def slot_values(levels: st.SearchStrategy[float], rows: int, slots: int) -> st.SearchStrategy[Tensor]:
    line = st.lists(levels, min_size=slots, max_size=slots)
    return st.lists(line, min_size=rows, max_size=rows).map(torch.tensor)


@st.composite
def inputs(draw: st.DrawFn, *, distinct: bool = False) -> RevealInputs:
    """Rows of a block with at least one candidate each; equal confidences are common, unless distinct."""
    rows, slots = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    masks = st.lists(st.booleans(), min_size=slots, max_size=slots).filter(any)
    if distinct:
        ranks = [draw(st.permutations(range(slots))) for _ in range(rows)]
        confidence = torch.tensor(ranks) / 8 + 0.0625
        entropy = (1 - confidence) * 2
    else:
        confidence = draw(slot_values(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), rows, slots))
        entropy = draw(slot_values(st.sampled_from([0.0, 0.03, 0.5, 2.0]), rows, slots))
    return RevealInputs(
        confidence=confidence,
        candidates=torch.tensor(draw(st.lists(masks, min_size=rows, max_size=rows))),
        steps_left=torch.tensor(draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))),
        progress=draw(row_values([0.0, 0.25, 0.5, 0.875], rows)),
        parameters={name: draw(row_values(levels, rows)) for name, levels in LEVELS.items()},
        features={"entropy": entropy, "gap": draw(slot_values(st.sampled_from([0.0, 2.5, 6.0, 8.0]), rows, slots))},
    )


def picked(case: RevealInputs, row: slice | Tensor, slot: Tensor | None = None) -> RevealInputs:
    """Some rows, or all rows with their slots in another order."""

    def of_slots(values: Tensor) -> Tensor:
        return values[row] if slot is None else values[:, slot]

    return RevealInputs(
        confidence=of_slots(case.confidence),
        candidates=of_slots(case.candidates),
        steps_left=case.steps_left[row],
        progress=case.progress[row],
        parameters={name: values[row] for name, values in case.parameters.items()},
        features={name: of_slots(values) for name, values in case.features.items()},
    )


# ------------------------------------------------------------------------------------------------- every policy
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
        assert torch.equal(POLICIES[name](picked(case, one)), together[one])


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"sequential"}))
@given(case=inputs(distinct=True), chance=st.randoms())
@settings(deadline=None, max_examples=40)
def test_where_a_slot_stands_does_not_matter(name: str, case: RevealInputs, chance: Any) -> None:
    """Only confidences and the like do, where they differ."""
    order = torch.tensor(chance.sample(range(case.confidence.shape[1]), case.confidence.shape[1]))
    assert torch.equal(POLICIES[name](picked(case, slice(None), order)), POLICIES[name](case)[:, order])


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(case=inputs())
@settings(deadline=None, max_examples=30)
def test_what_is_no_candidate_does_not_matter(name: str, case: RevealInputs) -> None:
    other = case.candidates.logical_not()
    noise = {key: values.masked_fill(other, 0.7) for key, values in case.features.items()}
    again = replace(case, confidence=case.confidence.masked_fill(other, 0.93), features=noise)
    assert torch.equal(POLICIES[name](again), POLICIES[name](case))


BOLDER = [  # policy, parameter, whether a higher value reveals more
    ("threshold", "threshold", False),
    ("factor", "factor", True),
    ("frechet", "budget", True),
    ("entropy", "gamma", True),
    ("budgeted", "gamma", False),
]


@pytest.mark.parametrize(("name", "parameter", "rising"), BOLDER)
@given(case=inputs())
@settings(deadline=None, max_examples=40)
def test_a_bolder_parameter_reveals_all_that_a_careful_one_does(
    name: str, parameter: str, rising: bool, case: RevealInputs
) -> None:
    values = sorted(LEVELS[parameter], reverse=not rising)
    rows = len(case.confidence)
    revealed = [
        POLICIES[name](replace(case, parameters={**case.parameters, parameter: torch.full((rows,), value)}))
        for value in values
    ]
    assert all(not (careful & ~bold).any() for careful, bold in pairwise(revealed))


@pytest.mark.parametrize("name", ["static", "budgeted", "prophet", "dimple"])
@given(case=inputs())
@settings(deadline=None, max_examples=40)
def test_fewer_steps_left_reveal_all_that_more_would(name: str, case: RevealInputs) -> None:
    careful = POLICIES[name](replace(case, steps_left=case.steps_left + 1))
    assert not (careful & ~POLICIES[name](case)).any()


# ------------------------------------------------------------------------------------------------- each policy
def one_row(
    confidence: list[float],
    masked: list[bool] | None = None,
    *,
    steps_left: int = 1,
    progress: float = 0.0,
    entropy: list[float] | None = None,
    gap: list[float] | None = None,
    **parameters: float,
) -> RevealInputs:
    features = {name: torch.tensor([values]) for name, values in (("entropy", entropy), ("gap", gap)) if values}
    return RevealInputs(
        torch.tensor([confidence]),
        torch.tensor([masked or [True] * len(confidence)]),
        torch.tensor([steps_left]),
        torch.tensor([progress]),
        {name: torch.tensor([value]) for name, value in parameters.items()},
        features,
    )


def opened(name: str, case: RevealInputs) -> list[int]:
    revealed: Tensor = POLICIES[name](case)[0]
    return revealed.nonzero()[:, 0].tolist()


def test_threshold_opens_all_above_it_strictly_and_the_best_one_otherwise() -> None:
    masked = [True, True, False, True]
    assert opened("threshold", one_row([0.91, 0.9, 0.99, 0.95], masked, threshold=0.9)) == [0, 3]
    assert opened("threshold", one_row([0.2, 0.3, 0.99, 0.1], masked, threshold=0.9)) == [1]
    assert opened("threshold", one_row([0.3, 0.3, 0.99, 0.1], masked, threshold=0.9)) == [0]
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


def test_factor_asks_the_more_of_the_last_the_more_there_are() -> None:
    """2 x 0.05 = 0.1, 3 x 0.2 = 0.6, 4 x 0.25 = 1.0 (not below 1), 5 x 0.3 = 1.5."""
    case = [0.75, 0.95, 0.7, 0.8]
    assert opened("factor", one_row(case, factor=1.0)) == [1, 3]
    assert opened("factor", one_row(case, factor=1.01)) == [0, 1, 3]
    assert opened("factor", one_row(case, factor=1.6)) == [0, 1, 2, 3]
    assert opened("factor", one_row(case, factor=0.05)) == [1], "one in any case"
    assert opened("factor", one_row(case, [True, False, True, False], factor=0.8)) == [0], "2 x 0.25 is, 3 x 0.3 is not"


def test_frechet_sums_the_doubts() -> None:
    """0.125, then 0.25 and 0.5 more: 0.125, 0.375, 0.875."""
    case = [0.5, 0.875, 0.75]
    assert opened("frechet", one_row(case, budget=0.376)) == [1, 2]
    assert opened("frechet", one_row(case, budget=0.375)) == [1], "under the budget, strictly"
    assert opened("frechet", one_row(case, budget=0.9)) == [0, 1, 2]
    assert opened("frechet", one_row(case, budget=0.01)) == [1], "one in any case"


def test_entropy_leaves_the_largest_out_of_the_sum() -> None:
    """Entropies 0.25, 0.5, 1.0: sums without the largest 0, 0.25, 0.75; confidence has no say."""
    case: dict[str, Any] = {"entropy": [1.0, 0.25, 0.5]}
    same = [0.9, 0.1, 0.5]
    assert opened("entropy", one_row(same, **case, gamma=0.0)) == [1]
    assert opened("entropy", one_row(same, **case, gamma=0.25)) == [1, 2]
    assert opened("entropy", one_row(same, **case, gamma=0.74)) == [1, 2]
    assert opened("entropy", one_row(same, **case, gamma=0.75)) == [0, 1, 2]
    assert opened("entropy", one_row([0.5] * 3, entropy=[0.0, 0.0, 0.0], gamma=0.0)) == [0, 1, 2], (
        "certain ones go free"
    )


def test_dimple_opens_the_sure_ones_or_else_what_the_schedule_wants() -> None:
    case = [0.96, 0.5, 0.4, 0.97]
    assert opened("dimple", one_row(case, gamma=0.95, steps_left=1)) == [0, 3]
    assert opened("dimple", one_row(case, gamma=0.98, steps_left=2)) == [0, 3]
    assert opened("dimple", one_row(case, gamma=0.98, steps_left=4)) == [3]


def test_budgeted_opens_the_sure_ones_and_never_fewer_than_the_schedule_wants() -> None:
    case = [0.96, 0.5, 0.4, 0.97]
    assert opened("budgeted", one_row(case, gamma=0.95, steps_left=4)) == [0, 3]
    assert opened("budgeted", one_row(case, gamma=0.965, steps_left=4)) == [3]
    assert opened("budgeted", one_row(case, gamma=0.95, steps_left=1)) == [0, 1, 2, 3]


def test_prophet_opens_all_once_the_mean_gap_is_wide_enough_for_the_progress() -> None:
    confidence, masked = [0.3, 0.2, 0.9], [True, True, False]

    def case(gap: float, progress: float) -> list[int]:
        return opened(
            "prophet", one_row(confidence, masked, steps_left=9, progress=progress, gap=[gap - 1, gap + 1, 99.0])
        )

    for progress, needed in ((0.0, 7.5), (0.33, 7.5), (0.34, 5.0), (0.66, 5.0), (0.67, 2.5), (0.99, 2.5)):
        assert case(needed, progress) == [0, 1]
        assert case(needed - 0.1, progress) == [0], "as static"


# ------------------------------------------------------------------------------------------------- steps
@pytest.mark.parametrize("name", ["static", "budgeted"])
@given(masked=st.integers(1, 32), steps=st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_a_schedule_ends_a_sub_block_within_its_steps(name: str, masked: int, steps: int) -> None:
    left, taken = masked, 0
    while left:
        case = one_row([0.1] * masked, [i < left for i in range(masked)], steps_left=max(1, steps - taken), gamma=0.8)
        left -= len(opened(name, case))
        taken += 1
    assert taken <= min(steps, masked)
    assert taken >= math.ceil(masked / math.ceil(masked / steps))


@given(steps=st.integers(1, 64), sub_blocks=st.integers(1, 8))
def test_a_block_s_steps_are_shared_over_its_sub_blocks(steps: int, sub_blocks: int) -> None:
    shares = [steps_of_sub_block(steps, i, sub_blocks) for i in range(sub_blocks)]
    assert sum(shares) == max(steps, sub_blocks), "none is lost, and every sub-block gets one"
    assert max(shares) - min(shares) <= 1


# ------------------------------------------------------------------------------------------------- parameters
TAKEN: dict[str, set[str]] = {
    "threshold": {"threshold"},
    "sequential": set(),
    "static": {"steps"},
    "factor": {"factor"},
    "frechet": {"budget"},
    "entropy": {"gamma"},
    "dimple": {"gamma", "steps"},
    "prophet": {"steps"},
    "budgeted": {"gamma", "steps"},
}


def test_every_policy_of_the_method_s_table_is_registered() -> None:
    assert {name: set(policy.parameters) for name, policy in POLICIES.items()} == TAKEN


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_a_policy_takes_its_own_parameters_and_refuses_every_other(name: str) -> None:
    for parameter in PARAMETERS:
        decode = DecodeConfig(policy=name, **{parameter: 1})  # type: ignore[arg-type]
        if parameter in TAKEN[name]:
            check_policy(decode)
        else:
            with pytest.raises(UserError, match=f"^{parameter} 1 has no effect with policy '{name}'"):
                check_policy(decode)


def test_a_probability_may_not_exceed_one_and_nats_may() -> None:
    check_policy(DecodeConfig(policy="entropy", gamma=1.5))
    for name in ("dimple", "budgeted"):
        with pytest.raises(UserError, match="gamma must be at most 1 with policy"):
            check_policy(DecodeConfig(policy=name, gamma=1.5))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"factor": 0.0}, "factor must be above 0 and finite, not 0.0"),
        ({"factor": math.inf}, "factor must be above 0 and finite, not inf"),
        ({"budget": -1.0}, "budget must be above 0 and finite, not -1.0"),
        ({"budget": math.nan}, "budget must be above 0 and finite, not nan"),
        ({"gamma": -0.1}, "gamma must be 0 or more and finite, not -0.1"),
        ({"gamma": math.nan}, "gamma must be 0 or more and finite, not nan"),
        ({"threshold": 0.0}, "threshold must be above 0 and at most 1, not 0.0"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
    ],
)
def test_a_parameter_out_of_bounds_is_refused_by_field_value_and_rule(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        DecodeConfig(**fields)
