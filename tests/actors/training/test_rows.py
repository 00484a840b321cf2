"""Packed rows: random access equals the rows written, and arithmetic alone says which rows a step takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.training.rows import PackedRows, RowFormat, RowOrder, Sample, holds_rows, micro_steps, permutation, share
from model.errors import UserError
from tests.model.rows import random_rows
from tests.packed import write_rows

FORM = RowFormat(block_size=8, context_length=48, mask_token_id=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven rows in three files, row groups of three rows."""
    return write_rows(tmp_path_factory.mktemp("rows"), random_rows(1, rows=11), FORM, parts=(4, 5, 2))


def test_rows_come_back_as_they_were_written_in_any_order(folder: Path) -> None:
    packed, written = PackedRows(str(folder)), random_rows(1, rows=11)
    order = [10, 0, 4, 3, 4, 8]
    read = packed.rows(order)
    assert (len(packed), packed.format) == (11, FORM)
    for name in ("input_ids", "labels", "document_ids", "position_ids"):
        assert getattr(read, name).dtype == torch.int64
        assert getattr(read, name).equal(getattr(written, name)[order])


def test_a_cache_too_small_for_a_row_group_changes_nothing(folder: Path) -> None:
    starved = PackedRows(str(folder), cache_bytes=1)
    assert starved.rows(range(11)).input_ids.equal(PackedRows(str(folder)).rows(range(11)).input_ids)


def test_a_uri_reads_as_a_path_does(folder: Path) -> None:
    assert PackedRows(f"file://{folder}").rows([7]).labels.equal(PackedRows(str(folder)).rows([7]).labels)


def test_what_is_not_packed_rows_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"holds no packed rows \(part-\*\.parquet\)"):
        PackedRows(str(tmp_path))
    (tmp_path / "part-00000.parquet").write_bytes((folder / "part-00000.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"part-00000\.parquet is not a whole Parquet file"):
        PackedRows(str(tmp_path))
    assert not holds_rows(str(tmp_path))
    assert holds_rows(str(folder))


def test_files_packed_differently_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, random_rows(1, rows=2), FORM)
    other = write_rows(tmp_path / "other", random_rows(1, rows=2), RowFormat(16, 48, 3))
    (other / "part-00000.parquet").rename(tmp_path / "part-00001.parquet")
    with pytest.raises(UserError, match="were packed differently"):
        PackedRows(str(tmp_path))


def test_rows_of_another_length_than_recorded_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, random_rows(1, rows=2), RowFormat(8, 64, 3))
    with pytest.raises(UserError, match="input_ids is not 64 tokens in every row"):
        PackedRows(str(tmp_path)).rows([0])


@settings(deadline=None)
@given(count=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_row_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(count, seed, epoch).tolist()) == list(range(count))


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_the_same_on_every_machine() -> None:
    assert permutation(8, 0, 0).tolist() == [0, 1, 6, 3, 5, 4, 2, 7]


@settings(deadline=None)
@given(rows=st.integers(1, 20), per_step=st.integers(1, 45), steps=st.integers(1, 12))
def test_steps_lie_end_to_end_across_epochs(rows: int, per_step: int, steps: int) -> None:
    order = RowOrder(rows, per_step, seed=3)
    seen = [sample for step in range(steps) for sample in order.samples(step)]
    expected = [Sample(int(permutation(rows, 3, at // rows)[at % rows]), at // rows) for at in range(steps * per_step)]
    assert seen == expected


@settings(deadline=None)
@given(count=st.integers(1, 40), ranks=st.integers(1, 9), micro_rows=st.integers(1, 7))
def test_ranks_share_a_batch_without_loss_in_equally_many_micro_batches(
    count: int, ranks: int, micro_rows: int
) -> None:
    samples = [Sample(row, 0) for row in range(count)]
    shares = [share(samples, rank, ranks, micro_rows) for rank in range(ranks)]
    assert Counter(s for micro in shares for one in micro for s in one) == Counter(samples)
    assert {len(micro) for micro in shares} == {micro_steps(count, ranks, micro_rows)}
    assert all(len(one) <= micro_rows for micro in shares for one in micro)
    sizes = [sum(len(one) for one in micro) for micro in shares]
    assert max(sizes) - min(sizes) <= 1
