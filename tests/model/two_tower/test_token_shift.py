"""A denoiser with a token shift: a slot's logits are of the slot behind it, a block's first is the context tower's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.decoding.requests import SamplingParams
from model.errors import UserError
from model.two_tower.config import TwoTowerConfig
from model.two_tower.decoding import TowerRequest, log_likelihoods, write_blocks, write_tokens
from model.two_tower.lossless import denoiser_drafter, write_lossless
from model.two_tower.towers import TwoTower
from model.two_tower.training import TwoTowerObjective, TwoTowerTraining, held_out_bound, read_context, token_losses
from tests.towers import (
    BLOCK,
    MASK,
    VOCAB,
    by_decoding,
    chat_rows,
    document_of,
    laid_out,
    shared_towers,
    shifted,
)


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(4, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def naive_blocks(towers: TwoTower, request: TowerRequest) -> list[int]:
    """The first token by the base model, the others by the denoiser's logits one slot before; Python loops, greedy."""
    ids, gamma, steps = list(request.prompt_ids), request.decode.gamma or 0.8, request.decode.steps or BLOCK
    end = len(ids) + request.max_tokens
    while len(ids) < end:
        head = write_tokens(towers, [TowerRequest(tuple(ids), 1)])[0].token_ids[0]
        canvas, masked = [head] + [MASK] * (BLOCK - 1), set(range(1, BLOCK))
        for step in range(steps):
            t = torch.tensor(len(masked) / BLOCK)
            logits = by_decoding(towers, torch.tensor(ids), torch.tensor(canvas), t).double()
            logits[:, MASK] = -torch.inf
            confidence, token = logits.softmax(-1).max(-1)
            order = sorted(masked, key=lambda slot: -float(confidence[slot - 1]))
            sure = sum(float(confidence[slot - 1]) > gamma for slot in masked)
            for slot in order[: max(sure, -(-len(masked) // (steps - step)))]:
                canvas[slot] = int(token[slot - 1])
                masked.remove(slot)
            if not masked:
                break
        ids += canvas
    return ids[len(request.prompt_ids) : end]


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_blocks_equal_the_algorithm_run_literally(kind: str) -> None:
    towers = shifted(shared_towers(kind))
    wanted = [TowerRequest(p, n) for p, n in zip(prompts(3, 4, 9), (6, 9, 4), strict=True)]
    answers = write_blocks(towers, wanted)
    assert [list(a.token_ids) for a in answers] == [naive_blocks(towers, r) for r in wanted]


def test_a_first_slot_is_never_masked_and_a_loss_is_of_the_logits_one_slot_before() -> None:
    for kind in ("qwen3", "nemotron_h"):
        towers, rows = shifted(shared_towers(kind)), chat_rows()
        batch = laid_out(towers, rows, keep_all=False)
        assert not batch.masked[:, 0].any() and batch.masked.any()
        assert torch.equal(batch.scored[:, :-1], batch.masked[:, 1:]) and not batch.scored[:, -1].any()
        with torch.no_grad():
            found = TwoTowerTraining(towers.writer())(batch, read_context(towers.context, batch))
        total = 0.0
        for n in range(len(batch.block_row)):
            number, start = int(batch.block_document[n]), int(batch.block_start[n])
            prefix = document_of(rows, number // 2, number % 2)[:start]
            logits = by_decoding(towers, prefix, batch.noisy_ids[n], batch.times[batch.time_index[n]])
            chosen = logits[:-1].log_softmax(-1).gather(1, batch.targets[n, 1:, None])[:, 0]
            total -= float(chosen[batch.masked[n, 1:]].sum())
        assert float(found) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h", "lfm2"])
def test_lossless_output_stays_the_base_models(kind: str) -> None:
    towers = shifted(shared_towers(kind))
    wanted = [TowerRequest(prompt, 10) for prompt in prompts(1, 4, 7)]
    expected = [answer.token_ids for answer in write_tokens(towers, wanted)]
    for steps in (1, 2):
        answers = write_lossless(towers, wanted, drafter=denoiser_drafter(steps))
        assert [answer.token_ids for answer in answers] == expected


def test_a_request_alone_equals_the_same_request_in_a_batch() -> None:
    towers = shifted(shared_towers("qwen3"))
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=1.2, top_k=9, seed=4),
    ]
    wanted = [TowerRequest(p, 7, sampling=s) for p, s in zip(prompts(2, 5, 8), kinds, strict=True)]
    together = write_blocks(towers, wanted)
    assert [write_blocks(towers, [one])[0].token_ids for one in wanted] == [a.token_ids for a in together]


def test_a_block_s_first_token_is_never_the_mask_however_likely() -> None:
    """The mask token is made the one that the base model would write first."""
    towers = shifted(shared_towers("llama"))
    for request in (TowerRequest(ids, 2 * BLOCK) for ids in prompts(5, 9)):
        likeliest = write_tokens(towers, [request])[0].token_ids[0]
        masked = replace(towers, config=replace(towers.config, mask_token_id=likeliest))
        assert likeliest not in write_blocks(masked, [request])[0].token_ids


def test_a_stop_token_in_a_first_slot_ends_the_answer_before_any_denoising() -> None:
    towers = shifted(shared_towers("llama"))
    (prompt,) = prompts(5)
    first = write_tokens(towers, [TowerRequest(prompt, 1)])[0].token_ids[0]
    (answer,) = write_blocks(towers, [TowerRequest(prompt, 9, stop_token_ids=frozenset({first}))])
    assert (answer.token_ids, answer.finish_reason, answer.forwards["denoise"]) == ((first,), "stop", 0)
    (one,) = write_blocks(towers, [TowerRequest(prompt, 1)])
    assert (one.token_ids, one.finish_reason, one.forwards["denoise"]) == ((first,), "length", 0)


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h"])
def test_the_bound_counts_first_tokens_by_the_context_tower(kind: str) -> None:
    towers, rows = shifted(shared_towers(kind)), chat_rows()
    objective = TwoTowerObjective(BLOCK, MASK, 0, towers.context.recurrent, token_shift=True)
    found = held_out_bound(towers, objective, [rows])
    batch = objective.measured.batch(rows, [0, 1], -1)
    with torch.no_grad():
        losses = token_losses(towers.writer(), batch, read_context(towers.context, batch))
    total = float((losses / batch.noise.double()).sum())
    for n in range(len(batch.block_row)):
        number, start = int(batch.block_document[n]), int(batch.block_start[n])
        document = document_of(rows, number // 2, number % 2)[: start + 1].tolist()
        total -= log_likelihoods(towers, [document])[0][-1]
    assert found.bound == pytest.approx(total / rows.supervised_tokens, rel=1e-5)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-6)


@pytest.mark.parametrize(("size", "shift"), [(1, True), (4, 1), (4, "yes")])
def test_a_config_that_cannot_be_is_refused(size: int, shift: object) -> None:
    with pytest.raises(UserError, match="token_shift"):
        TwoTowerConfig(size, MASK, token_shift=shift)  # type: ignore[arg-type]
