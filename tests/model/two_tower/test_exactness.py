"""What must hold for every architecture: the training pass computes what decoding computes, and reads, never writes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from model.two_tower.layout import lay_out_two_tower
from model.two_tower.reader import Reader, Stretch
from model.two_tower.towers import TwoTower
from model.two_tower.training import ContextStates, TwoTowerTraining, denoise, read_context
from tests.towers import (
    CONFIGS,
    HYBRIDS,
    MASK,
    by_decoding,
    chat_corruption,
    chat_rows,
    document_of,
    laid_out,
    relative_error,
    shared_towers,
    tiny_towers,
)

EXACT = 2e-6  # transformers rounds to float32 in norms, routers and scans


def all_logits(towers: TwoTower, batch: object, states: ContextStates) -> torch.Tensor:
    """[N, S, V]."""
    keep = torch.ones_like(batch.masked)  # type: ignore[attr-defined]
    with torch.no_grad():
        return denoise(towers.writer(), batch, states, keep).logits.view(*keep.shape, -1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_logits_of_a_block_equal_the_decoding_step(kind: str) -> None:
    """Every third block of a batch of packed chats, over its clean prefix, alone; recurrent layers both ways."""
    towers, rows = shared_towers(kind), chat_rows()
    batch = laid_out(towers, rows)
    logits = all_logits(towers, batch, read_context(towers.context, batch))
    for n in range(0, len(batch.block_row), 3):
        number, start = int(batch.block_document[n]), int(batch.block_start[n])
        prefix = document_of(rows, number // 2, number % 2)[:start]
        time = batch.times[batch.time_index[n]]
        stride = batch.noisy_ids.shape[1] if kind in HYBRIDS else None
        expected = by_decoding(towers, prefix, batch.noisy_ids[n], time, stride)
        assert relative_error(logits[n], expected) < EXACT, f"block {n}, at {start}"


@pytest.mark.parametrize("kind", HYBRIDS)
def test_boundary_states_of_one_pass_equal_those_of_a_pass_block_by_block(kind: str) -> None:
    towers, rows = shared_towers(kind), chat_rows()
    batch = laid_out(towers, rows)
    folded, replayed = (read_context(towers.context, batch, fold=fold).seeds for fold in (True, False))
    assert folded.keys() == replayed.keys() and folded
    for n in (0, 3, len(batch.block_row) - 1):
        number, start = int(batch.block_document[n]), int(batch.block_start[n])
        reader, stretch = Reader(towers, tokens=32, rows=1), Stretch()
        for token in document_of(rows, number // 2, number % 2)[:start].split(3):
            reader.extend([stretch], token[None])
        for layer, state in stretch.states.items():
            for seeds in (folded, replayed):
                assert relative_error(seeds[layer].conv[n], state.conv[0]) < EXACT
                if state.recurrent is not None:
                    ours = seeds[layer].recurrent
                    assert ours is not None and relative_error(ours[n], state.recurrent[0]) < EXACT


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "qwen3_moe", *HYBRIDS])
def test_no_gradient_reaches_the_context_tower_and_checkpointing_changes_none(kind: str) -> None:
    towers = tiny_towers(kind)
    batch = laid_out(towers, chat_rows(), keep_all=False)
    writer, gradients = towers.writer().train(), []
    for checkpointing in (False, True):
        if checkpointing:
            writer.causal_lm.activation_checkpointing_enable({"use_reentrant": False})
        writer.zero_grad()
        loss = TwoTowerTraining(writer)(batch, read_context(towers.context, batch))
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in writer.named_parameters() if p.grad is not None})
    assert all(p.grad is None and not p.requires_grad for p in towers.context.causal_lm.parameters())
    off, on = gradients
    assert off.keys() == on.keys() and any("time." in name for name in off)
    assert all(relative_error(on[name], off[name]) < EXACT for name in off if off[name].any())


@pytest.mark.parametrize("kind", ["mistral", "qwen3_moe", *HYBRIDS])
def test_a_changed_clean_block_leaves_the_blocks_up_to_it_unchanged(kind: str) -> None:
    towers, rows = shared_towers(kind), chat_rows()
    batch = laid_out(towers, rows)
    document = int(batch.block_document[-1])
    blocks = (batch.block_document == document).nonzero()[:, 0]
    row, place = int(batch.block_row[blocks[2]]), int(batch.block_offset[blocks[2]]) + 1  # inside block 2
    ids = batch.context_ids.clone()
    ids[row, place] = (ids[row, place] + 1) % 90 + 4
    changed = replace(batch, context_ids=ids)
    before, after = (all_logits(towers, b, read_context(towers.context, b)) for b in (batch, changed))
    assert torch.equal(before[blocks[:3]], after[blocks[:3]])
    assert (before[blocks[3]] != after[blocks[3]]).any()


@pytest.mark.parametrize("kind", HYBRIDS)
def test_blocks_of_one_token_do_not_disturb_the_states_they_start_from(kind: str) -> None:
    """The step for one token updates a recurrent state in place: it must not be the seed."""
    towers, rows = shared_towers(kind), chat_rows()
    batch = lay_out_two_tower(rows, chat_corruption(rows), block_size=1, mask_token_id=MASK, document_rows=True)
    states = read_context(towers.context, batch)
    before = copy.deepcopy(states.seeds)
    first, again = (all_logits(towers, batch, states) for _ in range(2))
    assert torch.equal(first, again)
    for layer, seed in before.items():
        assert torch.equal(states.seeds[layer].conv, seed.conv)
        now = states.seeds[layer].recurrent
        assert seed.recurrent is None or (now is not None and torch.equal(now, seed.recurrent))


@pytest.mark.parametrize("kind", ["nemotron_h", "lfm2"])
def test_what_a_read_does_not_commit_leaves_no_trace(kind: str) -> None:
    towers = shared_towers(kind)
    reader, stretch = Reader(towers, tokens=32, rows=1), Stretch()
    reader.extend([stretch], torch.arange(5, 12)[None])
    time, mask = torch.tensor([0.5]), torch.tensor([[MASK, MASK]])
    first = reader.denoise([stretch], mask, time)
    reader.read([stretch], torch.tensor([[9]]))
    assert torch.equal(reader.denoise([stretch], mask, time), first)
