"""The recipe's options compute what they say: a causal stream of its own, one view, no padding, long rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.ablations import without_padding
from model.backbone import Backbone, load_backbone
from model.errors import UserError
from model.layout import RowBatch
from model.masks import CAUSAL, NOISY_1, NOISY_2, dense
from model.objective import BlockDiffusion, NextToken, Objective, TrainingModel, hidden_states, make_objective
from tests.model.rows import MASK, random_rows
from tests.model.test_training import K, assert_same, loss_and_gradients, noise

WEIGHT = 0.25  # exact in float32


@pytest.fixture(scope="module")
def backbone(tiny_model: Path) -> Backbone:
    return load_backbone(tiny_model, dtype=torch.float64)


def objective(backbone: Backbone, **options: float) -> BlockDiffusion:
    return BlockDiffusion(K, MASK, seed=0, last_layer=backbone.layers - 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_the_causal_stream_adds_the_next_token_loss_of_the_same_rows_and_its_gradients(
    backbone: Backbone, seed: int
) -> None:
    rows, model = random_rows(seed, rows=3, blocks=8), TrainingModel(backbone.model)
    mask = noise(rows, seed)
    blocks = model(objective(backbone).corrupted(rows, mask, range(3)))
    plain = model(NextToken(K, backbone.layers - 1).batch(rows, range(3), 0))
    expected = loss_and_gradients(backbone, blocks + WEIGHT * plain)
    for keep_all in (False, True):
        kind = objective(backbone, ar_loss_weight=WEIGHT, keep_all=keep_all)
        assert_same(loss_and_gradients(backbone, model(kind.corrupted(rows, mask, range(3)))), expected)


def test_the_causal_stream_reads_itself_only_and_nobody_else_reads_it(backbone: Backbone) -> None:
    """Its predictions must not see the clean stream, whose blocks know their own end."""
    batch = objective(backbone, ar_loss_weight=WEIGHT).batch(random_rows(2, rows=2, blocks=8), [0, 1], 0)
    stream, position, document = batch.plan.tokens.stream, batch.plan.tokens.position, batch.plan.tokens.document
    allowed = dense(batch.plan.predicate, batch.plan.tokens)
    beside = stream == CAUSAL
    assert beside.any() and not allowed[beside][:, ~beside].any() and not allowed[~beside][:, beside].any()
    inside = allowed[beside][:, beside]
    later = position[beside][None] > position[beside][:, None]
    assert not (inside & later).any()
    assert torch.equal(inside, ~later & (document[beside][None] == document[beside][:, None]))


def test_the_network_does_not_mix_the_causal_stream_with_the_others(backbone: Backbone) -> None:
    """Seen at the hidden states: another text in the causal stream alone changes the causal stream alone."""
    rows = random_rows(4, rows=1, blocks=6)
    batch = objective(backbone, ar_loss_weight=WEIGHT).batch(rows, [0], 0)
    beside = batch.plan.tokens.stream == CAUSAL
    first = int(beside.nonzero()[0])
    changed = batch.input_ids.clone()
    changed[0, first] = (changed[0, first] + 1) % 200
    with torch.no_grad():
        before = hidden_states(backbone.model, batch)[0]
        batch.input_ids.copy_(changed)
        after = hidden_states(backbone.model, batch)[0]
    assert torch.equal(before[~beside], after[~beside])
    assert not torch.equal(before[beside], after[beside])


def test_with_one_view_the_loss_is_that_of_what_the_view_masks(backbone: Backbone) -> None:
    rows, model = random_rows(6, rows=3, blocks=8), TrainingModel(backbone.model)
    mask = noise(rows, 6)
    one = objective(backbone, complementary_masks=False).corrupted(rows, mask, range(3))
    other = objective(backbone, complementary_masks=False).corrupted(rows, ~mask, range(3))
    both = objective(backbone).corrupted(rows, mask, range(3))
    assert NOISY_2 not in one.plan.tokens.stream and NOISY_1 in one.plan.tokens.stream
    assert one.supervised_tokens == int(((rows.labels != -100) & mask).sum())
    assert one.supervised_tokens + other.supervised_tokens == both.supervised_tokens
    assert len({one.batch_hash, other.batch_hash, both.batch_hash}) == 3
    expected = loss_and_gradients(backbone, model(both))
    assert_same(loss_and_gradients(backbone, model(one) + model(other)), expected)


def test_without_padding_documents_stand_one_behind_the_other() -> None:
    rows = random_rows(7, rows=4, blocks=8)
    bare = without_padding(rows, MASK)
    for row in range(4):
        real = rows.input_ids[row] != MASK
        count = int(real.sum())
        for name in ("input_ids", "labels", "document_ids", "position_ids"):
            assert torch.equal(getattr(bare, name)[row, :count], getattr(rows, name)[row, real]), name
        assert (bare.document_ids[row, count:] == -1).all() and (bare.labels[row, count:] == -100).all()
        assert (bare.input_ids[row, count:] == MASK).all()
    assert bare.supervised_tokens == rows.supervised_tokens


def test_a_mask_token_that_a_prompt_wrote_is_no_padding() -> None:
    ids = torch.tensor([[20, MASK, 21, 22, 23, MASK, MASK, MASK, 30, 31, 32, MASK, MASK, MASK, MASK, MASK]])
    labels = torch.where((ids == 22) | (ids == 23) | (ids == 32), ids, -100)
    rows = RowBatch(ids, labels, torch.tensor([[0] * 8 + [1] * 8]), torch.arange(8).repeat(1, 2))
    bare = without_padding(rows, MASK)
    assert bare.input_ids[0, :8].tolist() == [20, MASK, 21, 22, 23, 30, 31, 32]
    assert bare.document_ids[0, :8].tolist() == [0] * 5 + [1] * 3


def test_the_naive_token_shift_is_the_published_step_on_rows_without_padding(backbone: Backbone) -> None:
    from tests.oracles import reference_loss

    rows = random_rows(8, rows=2, blocks=6)
    mask = noise(rows, 8)
    kind = objective(backbone, document_mask=False, document_padding=False)
    bare = without_padding(rows, MASK).without_documents()
    expected = loss_and_gradients(backbone, reference_loss(backbone.model, bare, mask, MASK, K, streams=2))
    assert_same(
        loss_and_gradients(backbone, TrainingModel(backbone.model)(kind.corrupted(rows, mask, [0, 1]))), expected
    )


@pytest.mark.parametrize(
    "kind",
    [
        BlockDiffusion(K, MASK, 0, 1),
        BlockDiffusion(K, MASK, 0, 1, ar_loss_weight=WEIGHT),
        BlockDiffusion(K, MASK, 0, 1, document_mask=False),
        BlockDiffusion(K, MASK, 0, 1, document_mask=False, document_padding=False),
        NextToken(K, 1),
    ],
)
def test_a_rows_length_is_what_the_network_runs_on_for_it(kind: Objective) -> None:
    rows = random_rows(9, rows=6, blocks=8)
    lengths = kind.lengths(rows)
    assert int(lengths.sum()) == kind.batch(rows, range(6), 0).tokens
    assert len(set(lengths.tolist())) > 1
    one_view = BlockDiffusion(K, MASK, 0, 1, complementary_masks=False)
    assert int(one_view.lengths(rows).sum()) >= one_view.batch(rows, range(6), 0).tokens


def test_a_row_longer_than_2048_tokens_costs_and_gives_what_its_documents_do(tmp_path: Path) -> None:
    from tests.tiny import build_tiny_model

    long = load_backbone(build_tiny_model(tmp_path / "long", max_position_embeddings=8192), dtype=torch.float64)
    parts = [random_rows(seed, rows=1, blocks=256) for seed in (10, 11)]
    parts[1].document_ids[parts[1].document_ids >= 0] += 1000
    names = ("input_ids", "labels", "document_ids", "position_ids")
    whole = RowBatch(*(torch.cat([getattr(part, name) for part in parts], 1) for name in names))
    assert whole.input_ids.shape[1] == 4096
    kind, model = objective(long), TrainingModel(long.model)
    mask = noise(whole, 12)
    with torch.no_grad():
        alone = [model(kind.corrupted(part, m, [0])) for part, m in zip(parts, mask.split(2048, 1), strict=True)]
        together = kind.corrupted(whole, mask, [0])
        assert model(together).item() == pytest.approx(float(sum(alone)), rel=1e-10)
        one_document = kind.corrupted(whole.without_documents(), mask, [0])
        assert float(model(one_document)) > 0


def test_options_that_do_not_go_together_are_one_sentence() -> None:
    with pytest.raises(UserError, match="set document_mask to false as well"):
        BlockDiffusion(K, MASK, 0, 1, document_padding=False)
    with pytest.raises(UserError, match="needs complementary masks"):
        BlockDiffusion(K, MASK, 0, 1, complementary_masks=False, ar_loss_weight=0.1)
    made = {"block_size": K, "mask_token_id": MASK, "seed": 0, "layers": 2}
    for option in ({"ar_loss_weight": 0.1}, {"complementary_masks": False}, {"document_padding": False}):
        with pytest.raises(UserError, match="belong to block_diffusion"):
            make_objective("next_token", **made, **option)  # type: ignore[arg-type]
