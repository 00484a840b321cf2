"""Dealing rows out by tokens: every row once, equal counts for every rank, nothing above the budget but single rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.training.micro_batches import deal


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 120),
)
def test_every_row_is_dealt_once_and_every_rank_gets_equally_many_forwards(
    lengths: list[int], ranks: int, budget: int
) -> None:
    dealt = deal(lengths, ranks, budget)
    assert len(dealt) == ranks
    assert len({len(parts) for parts in dealt}) == 1
    assert sorted(place for parts in dealt for part in parts for place in part) == list(range(len(lengths)))
    for parts in dealt:
        for part in parts:
            assert len(part) == 1 or sum(lengths[place] for place in part) <= budget
    assert dealt == deal(lengths, ranks, budget)
    assert len(dealt[0]) <= -(-len(lengths) // ranks)


def test_short_rows_share_a_forward_and_a_row_above_the_budget_runs_alone() -> None:
    assert deal([90, 10, 10, 10, 10], ranks=1, budget=50) == [[[0], [1, 2, 3, 4]]]
    assert deal([30, 30, 30, 30], ranks=2, budget=60) == [[[0, 2]], [[1, 3]]]


def test_ranks_run_like_work_at_the_same_time() -> None:
    lengths = [40, 38, 21, 20, 9, 8, 3, 2]
    for one, other in zip(*deal(lengths, ranks=2, budget=40), strict=True):
        loads = [sum(lengths[place] for place in part) for part in (one, other)]
        assert abs(loads[0] - loads[1]) <= 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_without_anything_to_learn_cost_nothing_and_are_dealt_all_the_same(ranks: int) -> None:
    dealt = deal([0, 0, 0, 0], ranks, budget=10)
    assert sorted(place for parts in dealt for part in parts for place in part) == [0, 1, 2, 3]
    assert len(dealt[0]) == 1
