"""The training step of TwoTower: which blocks there are, what is noised, and what the loss is a mean over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from model.errors import UserError
from model.layout import RowBatch
from model.masks import TAIL
from model.two_tower.layout import Corruption, TwoTowerBatch, draw_corruption, lay_out_two_tower
from model.two_tower.training import (
    TwoTowerObjective,
    TwoTowerTraining,
    denoise,
    held_out_bound,
    read_context,
    token_losses,
)
from tests.packed import counting_rows
from tests.towers import (
    BLOCK,
    MASK,
    VOCAB,
    by_decoding,
    chat_corruption,
    chat_rows,
    document_of,
    laid_out,
    relative_error,
    shared_towers,
    tiny_towers,
)


def lay_out(
    rows: RowBatch, corruption: Corruption, *, keep_all: bool = False, block_size: int = BLOCK
) -> TwoTowerBatch:
    return lay_out_two_tower(
        rows, corruption, block_size=block_size, mask_token_id=MASK, document_rows=False, keep_all=keep_all
    )


def everything_masked(rows: RowBatch, t: float = 1.0) -> Corruption:
    return Corruption(torch.full(rows.input_ids.shape, t), torch.ones_like(rows.input_ids, dtype=torch.bool))


def test_blocks_start_right_behind_every_prompt_and_the_last_of_a_response_is_filled_with_masks() -> None:
    rows = chat_rows()
    batch = lay_out(rows, everything_masked(rows), keep_all=True)
    at = list(zip(batch.block_row.tolist(), batch.block_offset.tolist(), batch.block_start.tolist(), strict=True))
    assert at[:5] == [(0, 5, 5), (0, 9, 9), (0, 13, 13), (0, 18, 1), (0, 22, 5)]  # two turns, then the next document
    assert [offset for row, offset, _ in at if row == 1] == list(range(2, 25, BLOCK))
    assert batch.masked[1].tolist() == [True, True, False, False]  # the first response is 6 tokens long
    assert batch.noisy_ids[1].tolist() == [MASK] * BLOCK
    assert batch.scored_tokens == rows.supervised_tokens == 41
    assert batch.positions[1].tolist() == [9, 10, 11, 12]


def test_prompts_are_never_noised_and_targets_stand_at_their_own_position() -> None:
    rows = chat_rows()
    batch = lay_out(rows, chat_corruption(rows))
    for n in range(len(batch.block_row)):
        for s in range(BLOCK):
            row, place = int(batch.block_row[n]), int(batch.block_offset[n]) + s
            if batch.masked[n, s]:
                assert rows.labels[row, place] == batch.targets[n, s] and batch.noisy_ids[n, s] == MASK
            elif batch.noisy_ids[n, s] != MASK:
                assert batch.noisy_ids[n, s] == rows.input_ids[row, place]
    assert batch.masked.any(1).all()  # a block without a masked token is left out


@pytest.mark.parametrize("document_rows", [False, True])
def test_padding_never_reaches_the_context_tower_which_need_not_know_a_mask(document_rows: bool) -> None:
    rows = counting_rows(12, mask_token_id=VOCAB)  # a token that only the denoiser has
    maker = TwoTowerObjective(BLOCK, VOCAB, 0, document_rows)
    batch = maker.batch(rows, range(12), 0)
    read = batch.context_documents != -1
    assert bool((batch.context_ids < VOCAB).all()) and bool((batch.noisy_ids == VOCAB).any())
    # what is read is all that some block may see: a document up to its last block
    last = torch.zeros(int(batch.block_document.max()) + 1).scatter_reduce(
        0, batch.block_document, batch.block_start.float(), "amax"
    )
    assert int(read.sum()) == int(last.sum())
    assert int(maker.lengths(rows).sum()) >= int(last.sum()) + batch.noisy_ids.numel()


def test_time_is_drawn_per_document_and_masks_with_that_probability() -> None:
    documents = torch.arange(4).repeat_interleave(500)[None]
    rows = RowBatch(documents, documents, documents, documents)
    ratios = []
    for sample in range(40):
        t, mask = draw_corruption(rows, 1, [sample], [0])
        for document in range(4):
            mine = documents[0] == document
            assert len(t[0, mine].unique()) == 1 and 1e-3 <= t[0, mine][0] < 1
            ratios.append(float(mask[0, mine].double().mean() - t[0, mine][0]))
    assert max(map(abs, ratios)) < 0.12 and abs(sum(ratios) / len(ratios)) < 0.01
    again = draw_corruption(rows, 1, [39], [0])
    assert torch.equal(again.mask, mask) and torch.equal(again.t, t)
    assert not torch.equal(draw_corruption(rows, 1, [39], [1]).mask, mask)


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h"])
def test_packed_documents_give_the_loss_of_each_alone_block_by_block(kind: str) -> None:
    """Sum over masked positions of what decoding's logits say, one document and one block at a time."""
    towers, rows = shared_towers(kind), chat_rows()
    batch = laid_out(towers, rows, keep_all=False)
    with torch.no_grad():
        packed = TwoTowerTraining(towers.writer())(batch, read_context(towers.context, batch))
        every = laid_out(towers, rows, keep_all=True)
        assert (
            relative_error(TwoTowerTraining(towers.writer())(every, read_context(towers.context, every)), packed) < 1e-7
        )
    total = 0.0
    for n in range(len(batch.block_row)):
        number, start = int(batch.block_document[n]), int(batch.block_start[n])
        prefix = document_of(rows, number // 2, number % 2)[:start]
        logits = by_decoding(towers, prefix, batch.noisy_ids[n], batch.times[batch.time_index[n]])
        chosen = logits.log_softmax(-1).gather(1, batch.targets[n][:, None])[:, 0]
        total -= float(chosen[batch.masked[n]].sum())
    assert float(packed) == pytest.approx(total, rel=1e-6)


def test_a_batch_without_supervision_counts_nothing_and_still_runs_every_module() -> None:
    for kind in ("llama", "lfm2"):
        towers, rows = shared_towers(kind), chat_rows()
        empty = replace(rows, labels=torch.full_like(rows.labels, -100))
        batch = laid_out(towers, empty, keep_all=False)
        assert batch.scored_tokens == 0 and batch.weight == 0.0
        writer = towers.writer()
        writer.zero_grad()
        loss = TwoTowerTraining(writer)(batch, read_context(towers.context, batch))
        loss.backward()
        assert loss.item() == 0.0
        assert all(not p.grad.any() for p in writer.parameters() if p.grad is not None)
        writer.zero_grad()


def test_the_held_out_bound_weighs_by_time_and_does_not_depend_on_grouping() -> None:
    towers, rows = shared_towers("qwen2"), chat_rows()
    objective = TwoTowerObjective(BLOCK, MASK, 0, towers.context.recurrent)
    whole = held_out_bound(towers, objective, [rows])
    halves = [
        RowBatch(*(x[i : i + 1] for x in (rows.input_ids, rows.labels, rows.document_ids, rows.position_ids)))
        for i in range(2)
    ]
    split = held_out_bound(towers, objective, halves)
    assert (split.loss, split.bound) == (pytest.approx(whole.loss, rel=1e-6), pytest.approx(whole.bound, rel=1e-6))
    batch = objective.batch(rows, [0, 1], -1)
    with torch.no_grad():
        losses = token_losses(towers.writer(), batch, read_context(towers.context, batch))
    times = batch.times[batch.time_index][:, None].expand_as(batch.masked)[batch.masked].double()
    assert whole.bound == pytest.approx(float((losses / times).sum()) / 41, rel=1e-6)
    assert whole.loss == pytest.approx(float(losses.mean()), rel=1e-6)
    assert sum(x is not None for x in whole.loss_by_t) >= 1
    assert not towers.writer().training


def test_the_bound_is_the_likelihood_where_a_block_is_one_token() -> None:
    """With blocks of one token and t = 1 nothing is approximate: the bound is the mean of -ln p of each token."""
    towers, rows = shared_towers("llama"), chat_rows()
    batch = lay_out(rows, everything_masked(rows), block_size=1)
    with torch.no_grad():
        losses = token_losses(towers.writer(), batch, read_context(towers.context, batch))
    n = 20
    number, start = int(batch.block_document[n]), int(batch.block_start[n])
    prefix = document_of(rows, number // 2, number % 2)[:start]
    logits = by_decoding(towers, prefix, torch.tensor([MASK]), torch.tensor(1.0))
    assert float(losses[n]) == pytest.approx(-float(logits[0].log_softmax(-1)[batch.targets[n, 0]]), rel=1e-6)
    assert math.isfinite(float(losses.sum())) and len(losses) == 41


@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoehybrid"])
def test_the_balance_of_experts_counts_once_per_masked_position(kind: str) -> None:
    towers = shared_towers(kind)
    batch = laid_out(towers, chat_rows(), keep_all=False)
    states = read_context(towers.context, batch)
    with torch.no_grad():
        plain, weighed = (TwoTowerTraining(towers.writer(), balance=w)(batch, states) for w in (0.0, 0.5))
        balance = denoise(towers.writer(), batch, states, balance=True).balance
    assert balance is not None and balance > 0
    assert float(weighed - plain) == pytest.approx(0.5 * batch.scored_tokens * float(balance), rel=1e-6)


def test_a_model_without_a_balance_loss_says_so() -> None:
    towers = shared_towers("llama")
    batch = laid_out(towers, chat_rows())
    with pytest.raises(UserError, match="LlamaForCausalLM has no load-balancing loss"):
        TwoTowerTraining(towers.writer(), balance=0.1)(batch, read_context(towers.context, batch))


def test_nothing_but_the_denoiser_and_the_time_modules_is_in_the_training_module() -> None:
    names = TwoTowerTraining(shared_towers("nemotron_h").writer()).state_dict()
    assert {name.split(".")[1] for name in names} == {"causal_lm", "time"}
    assert len(names) == len(shared_towers("nemotron_h").context.causal_lm.state_dict()) + 7


def test_logits_come_in_the_order_of_the_kept_places() -> None:
    towers = shared_towers("qwen3")
    batch = laid_out(towers, chat_rows())
    states = read_context(towers.context, batch)
    keep = torch.ones_like(batch.masked)
    with torch.no_grad():
        every = denoise(towers.writer(), batch, states, keep).logits.view(*keep.shape, -1)
        some = denoise(towers.writer(), batch, states).logits
    assert relative_error(some, every[batch.masked]) < 1e-9


def test_documents_may_have_any_numbers_as_in_rows_packed_from_much_data() -> None:
    rows = chat_rows()
    high = replace(rows, document_ids=torch.where(rows.document_ids == TAIL, TAIL, 10**9 + 7 * rows.document_ids))
    for document_rows in (False, True):
        one, other = (
            lay_out_two_tower(x, chat_corruption(x), block_size=BLOCK, mask_token_id=MASK, document_rows=document_rows)
            for x in (rows, high)
        )
        for name, tensor in vars(one).items():
            assert torch.equal(tensor, getattr(other, name)) if isinstance(tensor, torch.Tensor) else True, name


@pytest.mark.parametrize("kind", ["qwen3", "falcon_h1", "granitemoehybrid", "gpt2", "gemma2"])
def test_the_loss_needs_no_logits_and_equals_that_of_the_model_s_own_head(kind: str) -> None:
    """Heads that multiply, divide or cap their logits too."""
    towers, rows = tiny_towers(kind), chat_rows()
    batch = laid_out(towers, rows, keep_all=False)
    states, writer = read_context(towers.context, batch), towers.writer()
    expected = token_losses(writer, batch, states).sum()
    expected.backward()
    gradients = {name: p.grad for name, p in writer.named_parameters()}
    writer.zero_grad(set_to_none=True)
    widths = []
    module = TwoTowerTraining(writer)
    writer.causal_lm.get_output_embeddings().register_forward_hook(
        lambda module, args, out: widths.append(out[1].ndim if isinstance(out, tuple) else out.ndim)
    )
    found = module(batch, states)
    found.backward()
    assert widths == [1], "the head gives losses, a number each"
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    for name, parameter in writer.named_parameters():
        mine, theirs = parameter.grad, gradients[name]
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None and theirs.abs().max() > 0:
            assert relative_error(mine, theirs) < 1e-5, name
