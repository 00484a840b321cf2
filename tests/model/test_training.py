"""METHOD section 1's invariants: what training computes is what the published step computes, at less cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model.backbone import Backbone, load_backbone
from model.corruption import complementary_views, draw_noise, row_generator
from model.errors import UserError
from model.layout import RowBatch
from model.masks import CLEAN, NOISY_1, block_diffusion, dense, stream_tokens
from model.objective import BlockDiffusion, NextToken, TrainingModel, held_out_loss, hidden_states, predicted_logits
from tests.model.rows import MASK, random_rows
from tests.oracles import logits_of, reference_loss

K = 8
GRADIENT_TOLERANCE = 1e-6  # transformers' RMSNorm and RoPE round to float32 inside, in float64 models too


@pytest.fixture(scope="module")
def backbone(tiny_model: Path) -> Backbone:
    return load_backbone(tiny_model, dtype=torch.float64)


def noise(rows: RowBatch, seed: int) -> torch.Tensor:
    return torch.stack(
        [draw_noise(rows.input_ids.shape[1], K, row_generator(seed, i, 0))[1] for i in range(len(rows.input_ids))]
    )


def objective(backbone: Backbone, **options: bool) -> BlockDiffusion:
    return BlockDiffusion(K, MASK, seed=0, last_layer=backbone.layers - 1, **options)


def loss_and_gradients(backbone: Backbone, loss: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    backbone.model.zero_grad()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in backbone.model.parameters() if p.grad is not None]


def assert_same(a: tuple[float, list[torch.Tensor]], b: tuple[float, list[torch.Tensor]]) -> None:
    assert a[0] == pytest.approx(b[0], rel=1e-11)
    assert len(a[1]) == len(b[1]) > 10
    for left, right in zip(a[1], b[1], strict=True):
        assert float((left - right).abs().max()) <= GRADIENT_TOLERANCE * float(right.abs().max())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep_all", [True, False])
def test_loss_and_gradients_equal_the_published_form_of_two_rows_of_2l(
    backbone: Backbone, seed: int, keep_all: bool
) -> None:
    rows = random_rows(seed)
    mask = noise(rows, seed)
    ours = objective(backbone, keep_all=keep_all).corrupted(rows, mask, range(2))
    expected = loss_and_gradients(backbone, reference_loss(backbone.model, rows, mask, MASK, K, streams=2))
    assert_same(loss_and_gradients(backbone, TrainingModel(backbone.model)(ours)), expected)


def test_three_streams_give_the_loss_and_gradients_of_two_rows_of_2l(backbone: Backbone) -> None:
    rows = random_rows(11)
    mask = noise(rows, 11)
    four = loss_and_gradients(backbone, reference_loss(backbone.model, rows, mask, MASK, K, streams=2))
    three = loss_and_gradients(backbone, reference_loss(backbone.model, rows, mask, MASK, K, streams=3))
    assert_same(three, four)


def test_the_layout_drops_what_no_loss_reads_and_only_that(backbone: Backbone) -> None:
    rows = random_rows(5, rows=4, blocks=12)
    mask = noise(rows, 5)
    full = objective(backbone, keep_all=True).corrupted(rows, mask, range(4))
    cut = objective(backbone).corrupted(rows, mask, range(4))
    assert full.tokens == 3 * rows.input_ids.numel()
    assert cut.tokens < 0.75 * full.tokens
    assert torch.equal(torch.sort(cut.targets).values, torch.sort(full.targets).values)


def test_noisy_logits_in_training_equal_those_of_the_block_over_its_clean_prefix(backbone: Backbone) -> None:
    rows = random_rows(3, rows=1, blocks=5).without_documents()
    mask = noise(rows, 3)
    views = complementary_views(rows.input_ids, rows.labels, mask, MASK)
    batch = objective(backbone, keep_all=True).corrupted(rows, mask, [0])
    with torch.no_grad():
        trained = backbone.model.lm_head(hidden_states(backbone.model, batch))[0]
    tokens = stream_tokens(rows.document_ids[0], K, (CLEAN, NOISY_1))
    for k in range(5):
        start, length = k * K, rows.input_ids.shape[1]
        keep = torch.cat((torch.arange(start), length + torch.arange(start, start + K)))
        ids = torch.cat((rows.input_ids[0, :start], views[0][0, start : start + K]))
        allowed = dense(block_diffusion, tokens)[keep][:, keep]
        with torch.no_grad():
            alone = logits_of(backbone.model, ids, torch.arange(start + K), allowed)[start:]
        at = batch.plan.clean + 2 * k * K
        assert (trained[at : at + K] - alone).abs().max() < 1e-10


def test_changing_a_clean_block_leaves_noisy_blocks_up_to_it_unchanged(backbone: Backbone) -> None:
    rows = random_rows(4, rows=1, blocks=5).without_documents()
    views = complementary_views(rows.input_ids, rows.labels, noise(rows, 4), MASK)
    ids = torch.cat((rows.input_ids[0], views[0][0]))
    tokens = stream_tokens(rows.document_ids[0], K, (CLEAN, NOISY_1))
    positions, allowed = rows.position_ids[0].repeat(2), dense(block_diffusion, tokens)
    changed = ids.clone()
    changed[2 * K : 3 * K] = (changed[2 * K : 3 * K] + 1) % 200
    with torch.no_grad():
        before, after = (logits_of(backbone.model, x, positions, allowed)[5 * K :] for x in (ids, changed))
    assert torch.equal(before[: 3 * K], after[: 3 * K])
    assert not torch.allclose(before[3 * K :], after[3 * K :])


def test_every_supervised_token_is_masked_in_exactly_one_view_over_thousands_of_draws() -> None:
    rows = random_rows(6)
    supervised = rows.labels != -100
    draws, masked_in_first = 2000, torch.zeros_like(rows.input_ids)
    for draw in range(draws):
        first, second = complementary_views(rows.input_ids, rows.labels, noise(rows, draw), MASK)
        hit_first, hit_second = first == MASK, second == MASK
        assert torch.equal((hit_first ^ hit_second) & supervised, supervised)
        assert torch.equal(first[~supervised], rows.input_ids[~supervised])
        assert torch.equal(second[~supervised], rows.input_ids[~supervised])
        masked_in_first += hit_first & supervised
    share = masked_in_first[supervised].double() / draws
    assert (share - 0.5005).abs().max() < 0.06


def test_packed_loss_equals_the_sum_of_the_documents_alone(backbone: Backbone) -> None:
    rows = random_rows(8, rows=1, blocks=10)
    mask, model = noise(rows, 8), TrainingModel(backbone.model)
    packed = model(objective(backbone).corrupted(rows, mask, [0])).item()
    alone = 0.0
    for document in range(int(rows.document_ids.max()) + 1):
        own = (rows.document_ids[0] == document).nonzero()[:, 0]
        single = RowBatch(*(x[:, own] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids)))
        assert single.position_ids[0, 0] == 0
        alone += model(objective(backbone).corrupted(single, mask[:, own], [0])).item()
    assert packed == pytest.approx(alone, rel=1e-11)
    assert packed > 0


def test_corruption_depends_on_seed_sample_and_epoch_but_not_on_the_batch(backbone: Backbone) -> None:
    rows, one = random_rows(9, rows=3), objective(backbone)
    together = one.batch(rows, [5, 6, 7], 0)
    single = one.batch(
        RowBatch(rows.input_ids[1:2], rows.labels[1:2], rows.document_ids[1:2], rows.position_ids[1:2]), [6], 0
    )
    assert "".join(map(str, single.targets.tolist())) in "".join(map(str, together.targets.tolist()))
    m = [draw_noise(48, K, row_generator(*key))[1] for key in ((0, 6, 0), (0, 6, 0), (1, 6, 0), (0, 7, 0), (0, 6, 1))]
    assert torch.equal(m[0], m[1])
    assert not any(torch.equal(m[0], other) for other in m[2:])
    assert together.batch_hash == one.batch(rows, [5, 6, 7], 0).batch_hash != one.batch(rows, [5, 6, 7], 1).batch_hash


def test_the_batch_hash_names_the_samples_too(backbone: Backbone) -> None:
    """The control has no corruption to tell two equal rows apart by."""
    rows, control = random_rows(9, rows=2), NextToken(K, backbone.layers - 1)
    assert control.batch(rows, [5, 6], 0).batch_hash != control.batch(rows, [5, 7], 0).batch_hash


def test_a_batch_without_supervised_tokens_gives_zero_loss_and_zero_gradients(backbone: Backbone) -> None:
    rows = random_rows(10)
    silent = RowBatch(rows.input_ids, torch.full_like(rows.labels, -100), rows.document_ids, rows.position_ids)
    for kind in (objective(backbone), NextToken(K, backbone.layers - 1)):
        batch = kind.batch(silent, [0, 1], 0)
        loss, gradients = loss_and_gradients(backbone, TrainingModel(backbone.model)(batch))
        assert loss == 0.0 and batch.supervised_tokens == 0
        assert all(bool((g == 0).all()) for g in gradients)


def test_the_next_token_loss_equals_the_causal_loss_of_transformers(backbone: Backbone, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = random_rows(12, rows=1, blocks=10)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager")
    expected = 0.0
    for document in range(int(rows.document_ids.max()) + 1):
        own = (rows.document_ids[0] == document).nonzero()[:, 0]
        logits = plain(rows.input_ids[:, own]).logits[0, :-1]
        expected += torch.nn.functional.cross_entropy(logits, rows.labels[0, own][1:], reduction="sum").item()
    ours = TrainingModel(backbone.model)(NextToken(K, backbone.layers - 1).batch(rows, [0], 0)).item()
    assert ours == pytest.approx(expected, rel=1e-7)
    assert expected > 0


def test_held_out_loss_does_not_depend_on_how_the_rows_are_grouped(backbone: Backbone) -> None:
    rows = random_rows(13, rows=4)
    whole = held_out_loss(backbone.model, objective(backbone), [rows])
    assert whole == pytest.approx(held_out_loss(backbone.model, objective(backbone), singles(rows)), rel=1e-12)
    silent = RowBatch(rows.input_ids, torch.full_like(rows.labels, -100), rows.document_ids, rows.position_ids)
    with pytest.raises(UserError, match="no supervised token"):
        held_out_loss(backbone.model, objective(backbone), [silent])


def singles(rows: RowBatch) -> Iterator[RowBatch]:
    for b in range(len(rows.input_ids)):
        yield RowBatch(*(x[b : b + 1] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids)))


def test_rows_packed_for_another_block_size_are_refused(backbone: Backbone) -> None:
    rows = random_rows(14)
    for block_size in (7, 16):
        with pytest.raises(UserError, match="pack them again"):
            BlockDiffusion(block_size, MASK, 0, 1).batch(rows, [0, 1], 0)


def test_the_head_runs_once_on_predicted_slots_only(backbone: Backbone) -> None:
    rows = random_rows(15)
    seen: list[tuple[int, ...]] = []
    hook = backbone.model.lm_head.register_forward_pre_hook(lambda _, x: seen.append(tuple(x[0].shape)))
    batch = objective(backbone).batch(rows, [0, 1], 0)
    predicted_logits(backbone.model, batch)
    hook.remove()
    assert len(seen) == 1
    assert seen[0][0] == len(batch.targets) <= rows.supervised_tokens
