"""Complementary masks: a step learns every token of an answer once, in the view that masks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.masks import NOISY_1, NOISY_2
from model.two_tower.layout import Corruption, TwoTowerBatch, complement, lay_out_two_tower
from model.two_tower.towers import TwoTower
from model.two_tower.training import TwoTowerObjective, TwoTowerTraining, read_context
from tests.towers import chat_corruption, chat_rows, laid_out, shared_towers, shifted


def both_views(towers: TwoTower, corruption: Corruption, *, keep_all: bool = False) -> TwoTowerBatch:
    return lay_out_two_tower(
        chat_rows(),
        corruption,
        block_size=towers.config.block_size,
        mask_token_id=towers.config.mask_token_id,
        document_rows=towers.context.recurrent,
        token_shift=towers.config.token_shift,
        complementary=True,
        keep_all=keep_all,
    )


def loss_of(towers: TwoTower, batch: TwoTowerBatch) -> float:
    with torch.no_grad():
        return float(TwoTowerTraining(towers.writer())(batch, read_context(towers.context, batch)))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "nemotron_h"])
def test_the_loss_is_that_of_one_view_and_then_of_the_other(kind: str, shift: bool) -> None:
    """Views of one block lie in one sequence and do not see each other."""
    towers = shifted(shared_towers(kind)) if shift else shared_towers(kind)
    first = chat_corruption(chat_rows())
    apart = [
        loss_of(towers, laid_out(towers, chat_rows(), view, keep_all=False)) for view in (first, complement(first))
    ]
    assert loss_of(towers, both_views(towers, first)) == pytest.approx(sum(apart), rel=1e-6)


def test_every_token_of_an_answer_is_masked_in_one_view() -> None:
    towers, rows = shared_towers("qwen3"), chat_rows()
    batch = both_views(towers, chat_corruption(rows), keep_all=True)
    count = len(batch.stream) // 2
    assert batch.stream.tolist() == [NOISY_1] * count + [NOISY_2] * count
    both = batch.masked[:count].long() + batch.masked[count:].long()
    assert set(both.flatten().tolist()) == {0, 1}
    assert batch.scored_tokens == rows.supervised_tokens
    t, other = (batch.times[batch.time_index[half]] for half in (slice(count), slice(count, None)))
    assert torch.allclose(t + other, torch.ones_like(t))


def test_work_of_a_row_counts_both_views() -> None:
    rows = chat_rows()
    one = TwoTowerObjective(4, 3, 0, document_rows=False)
    two = replace(one, complementary_masks=True, keep_all=True)
    batch = two.batch(rows, [0, 1], 0)
    assert int((two.lengths(rows) - one.lengths(rows)).sum()) * 2 == batch.noisy_ids.numel()
