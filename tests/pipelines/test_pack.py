"""The packing plan: block-aligned, nothing lost or doubled, best fit, and a function of the lengths alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import mark, raises

from actors.training.rows import ROW_SCHEMA
from pipelines.chats.pack import Plan, parts, plan_rows
from pipelines.chats.rows import IGNORED, TAIL, Placed, RowFormat, build_rows

MASK = 9999
shapes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))  # block size, blocks in a row


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    """Lengths, block size, row length, window."""
    block, blocks = draw(shapes)
    lengths = draw(st.lists(st.integers(1, block * blocks), max_size=60))
    return np.array(lengths, dtype=np.int32), block, block * blocks, draw(st.sampled_from([3, 10, 1000]))


def rows_of(lengths: np.ndarray, plan: Plan, block: int, row: int) -> dict[str, np.ndarray]:
    """The columns of the rows of documents whose tokens count up from 10 x their index."""
    placed = [
        Placed(
            index=index,
            row=int(plan.rows[index]),
            start=int(plan.starts[index]),
            input_ids=np.arange(length, dtype=np.int32) + 10 * index,
            labels=np.where(np.arange(length) % 2, np.arange(length) + 10 * index, IGNORED).astype(np.int32),
        )
        for index, length in enumerate(lengths)
    ]
    table = build_rows(placed, plan.row_count, RowFormat(block, row, MASK))
    assert table.schema.equals(ROW_SCHEMA)
    return {name: np.array(table[name].to_pylist(), dtype=np.int32).reshape(-1, row) for name in table.column_names}


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_every_document_is_in_the_rows_once_and_whole(problem):
    lengths, block, row, window = problem
    plan = plan_rows(lengths, block_size=block, context_length=row, seed=1, window=window)
    columns = rows_of(lengths, plan, block, row)
    for index, length in enumerate(lengths):
        rows, places = np.nonzero(columns["document_ids"] == index)
        padded = -(-length // block) * block
        assert len(rows) == padded and len(set(rows.tolist())) == 1
        assert (np.diff(places) == 1).all() and places[0] % block == 0
        at = (rows[0], slice(places[0], places[0] + length))
        np.testing.assert_array_equal(columns["input_ids"][at], np.arange(length) + 10 * index)
        np.testing.assert_array_equal(columns["labels"][at][1::2], columns["input_ids"][at][1::2])
        assert (columns["labels"][at][::2] == IGNORED).all()
        np.testing.assert_array_equal(
            columns["position_ids"][rows[0], places[0] : places[0] + padded], np.arange(padded)
        )
    total = (-(-lengths // block) * block).sum()
    assert (columns["document_ids"] != TAIL).sum() == total


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_no_block_holds_two_documents_and_only_padding_is_the_mask(problem):
    lengths, block, row, window = problem
    plan = plan_rows(lengths, block_size=block, context_length=row, seed=0, window=window)
    columns = rows_of(lengths, plan, block, row)
    blocks = columns["document_ids"].reshape(-1, block)
    assert (blocks == blocks[:, :1]).all()
    padding = columns["input_ids"] == MASK
    assert padding.sum() == plan.row_count * row - lengths.sum()
    assert (columns["labels"][padding] == IGNORED).all()
    tail = columns["document_ids"] == TAIL
    assert (columns["position_ids"][tail] == 0).all() and padding[tail].all()


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_best_fit_leaves_no_two_rows_that_would_fit_in_one(problem):
    lengths, block, row, _ = problem
    plan = plan_rows(lengths, block_size=block, context_length=row, seed=0)
    used = np.bincount(plan.rows, -(-lengths // block) * block, minlength=plan.row_count)
    assert (used > 0).all() and (used <= row).all()
    if len(used) > 1:
        assert np.sort(used)[:2].sum() > row


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_documents_of_a_row_stand_in_input_order_without_gaps(problem):
    lengths, block, row, window = problem
    plan = plan_rows(lengths, block_size=block, context_length=row, seed=3, window=window)
    for number in range(plan.row_count):
        inside = np.flatnonzero(plan.rows == number)
        sizes = -(-lengths[inside] // block) * block
        np.testing.assert_array_equal(plan.starts[inside], np.cumsum(sizes) - sizes)


def test_the_seed_orders_the_rows_and_changes_nothing_else():
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    plans = [plan_rows(lengths, block_size=8, context_length=256, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(plans[0].rows, plans[1].rows)
    assert (plans[0].rows != plans[2].rows).any()
    sets = [{frozenset(np.flatnonzero(plan.rows == row)) for row in range(plan.row_count)} for plan in plans]
    assert sets[0] == sets[2]


def test_rows_of_a_window_hold_only_documents_of_the_window():
    lengths = np.random.default_rng(0).integers(1, 200, 95)
    plan = plan_rows(lengths, block_size=8, context_length=256, seed=0, window=10)
    for row in range(plan.row_count):
        assert len(set((np.flatnonzero(plan.rows == row) // 10).tolist())) == 1


@settings(max_examples=80, deadline=None)
@given(problem=problems(), rows=st.tuples(st.integers(0, 20), st.integers(1, 9)))
def test_the_documents_of_some_rows_are_found_without_looking_at_the_others(problem, rows):
    lengths, block, row, window = problem
    plan = plan_rows(lengths, block_size=block, context_length=row, seed=0, window=window)
    first = min(rows[0], max(plan.row_count - 1, 0))
    last = min(first + rows[1], plan.row_count)
    found = plan.documents_of(first, last) if plan.row_count else np.zeros(0)
    np.testing.assert_array_equal(found, np.flatnonzero((plan.rows >= first) & (plan.rows < last)))


def test_long_documents_make_shorter_windows(monkeypatch):
    monkeypatch.setattr("pipelines.chats.pack.WINDOW_TOKENS", 1024)
    plan = plan_rows(np.full(40, 60), block_size=4, context_length=64, seed=0)
    assert plan.windows.tolist() == [[0, 0], [17, 17], [34, 34], [40, 40]]
    assert plan.row_count == 40


def test_real_lengths_fill_the_rows():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, 5000).astype(int), 1, 2048)
    plan = plan_rows(lengths, block_size=32, context_length=2048, seed=0)
    blocks = -(-lengths // 32)
    assert blocks.sum() * 32 / (plan.row_count * 2048) > 0.99


@mark.parametrize("length", [0, 65])
def test_a_document_that_fits_no_row_is_an_error(length):
    with raises(ValueError, match="lengths must be from 1 to 64"):
        plan_rows(np.array([length]), block_size=8, context_length=64, seed=0)


def test_parts_cover_all_rows():
    plan = Plan(np.zeros(0), np.zeros(0), 7, np.zeros((1, 2)))
    assert list(parts(plan, 3)) == [(0, 3), (3, 6), (6, 7)]


def test_a_document_goes_into_the_fullest_row_that_takes_it():
    plan = plan_rows(np.array([6, 3, 7]) * 4, block_size=4, context_length=40, seed=0)
    assert plan.row_count == 2
    assert plan.rows[1] == plan.rows[2] != plan.rows[0]


def test_documents_of_one_length_are_taken_in_input_order():
    """Another order of equals would be another packing of the same data by the next version."""
    plan = plan_rows(np.full(7, 16), block_size=8, context_length=32, seed=0)
    together = [np.flatnonzero(plan.rows == row).tolist() for row in plan.rows[::2]]
    assert together == [[0, 1], [2, 3], [4, 5], [6]]
