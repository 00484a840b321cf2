"""The round planner, on numbers alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.scheduler import Demand, Grant, Queue, plan_round


def prefill(name: str, left: int, block_size: int = 8) -> Demand:
    return Demand(name, left, 0, block_size)


def decode(name: str, tokens: int = 8) -> Demand:
    return Demand(name, 0, tokens, 8)


def test_every_decoding_row_runs_in_every_round() -> None:
    demands = [decode("a"), prefill("long", 800), decode("b", 4), decode("c", 1)]
    assert plan_round(demands, 16) == [Grant("a", 8), Grant("long", 16), Grant("b", 4), Grant("c", 1)]


def test_prefill_is_rounded_down_to_whole_blocks() -> None:
    assert plan_round([prefill("a", 800)], 30) == [Grant("a", 24)]
    assert plan_round([prefill("a", 16)], 30) == [Grant("a", 16)]
    assert plan_round([prefill("a", 800, block_size=1)], 30) == [Grant("a", 30)]


def test_the_first_comer_is_encoded_first_and_the_rest_of_the_budget_goes_on() -> None:
    demands = [prefill("a", 24), prefill("b", 800), prefill("c", 800)]
    assert plan_round(demands, 64) == [Grant("a", 24), Grant("b", 40)]


def test_a_budget_below_the_block_stalls_nobody() -> None:
    assert plan_round([prefill("a", 800), prefill("b", 8), prefill("c", 3, block_size=1)], 1) == [Grant("a", 8)]


@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 4, 8])), max_size=8),
    budget=st.integers(1, 100),
)
def test_a_round_keeps_to_its_budget_and_moves_somebody(rows: list[tuple[int, int]], budget: int) -> None:
    demands = [Demand(str(i), blocks * size, size, size) for i, (blocks, size) in enumerate(rows)]
    grants = {g.id: g.tokens for g in plan_round(demands, budget)}
    encoded = [(d, grants.get(d.id, 0)) for d in demands if d.prefill_left]
    assert all(grants[d.id] == d.query_tokens for d in demands if not d.prefill_left)
    assert all(0 <= t <= d.prefill_left and t % d.block_size == 0 for d, t in encoded)
    assert sum(t for _, t in encoded) <= max(budget, encoded[0][0].block_size if encoded else 0)
    assert not encoded or encoded[0][1] > 0


def test_the_queue_is_first_come_first_served_but_for_those_who_ran_before() -> None:
    queue = Queue()
    for name in "abcd":
        queue.join(name)
    queue.leave("b")
    assert list(queue) == ["a", "c", "d"] and len(queue) == 3
    queue.join_first("older")
    assert list(queue) == ["older", "a", "c", "d"]
    queue.leave("older")
    assert "d" in queue and "older" not in queue
    with pytest.raises(AssertionError, match="waits already"):
        queue.join("d")


def test_the_planner_needs_neither_torch_nor_ray() -> None:
    code = "import sys, actors.engine.scheduler; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
