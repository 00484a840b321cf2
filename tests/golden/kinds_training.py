"""Golden kinds of the training side: the published training forward, and a noisy block over a cached clean prefix."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.backbone import Backbone, load_backbone
from model.cache import BlockCache
from model.decoding.plan import DecodePlan, Piece
from model.layout import RowBatch
from model.masks import CLEAN, NOISY_1, block_diffusion, dense, stream_tokens
from model.objective import BlockDiffusion, TrainingModel, hidden_states, token_losses
from tests.oracles import logits_of

METHOD = "fast_dllm_v2"
# Parameters are float64, transformers' norm and rope round to float32 inside: the README's second row.
RELATIVE = 1e-6
CE_ABSOLUTE = 1e-8
GRADIENT = 1e-6


@lru_cache(maxsize=2)
def golden_backbone(folder: Path) -> Backbone:
    return load_backbone(folder, dtype=torch.float64)


def rows_of(case: dict[str, Any]) -> RowBatch:
    ids, labels = torch.tensor(case["input_ids"]), torch.tensor(case["labels"])
    return RowBatch(ids, labels, torch.zeros_like(ids), torch.arange(ids.shape[1]).expand_as(ids))


def assert_logits(ours: torch.Tensor, expected: list[float]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert float((ours - wanted).abs().max()) <= RELATIVE * float(wanted.abs().max())


def training_forward(case: dict[str, Any], meta: dict[str, Any], model_folder: Path) -> None:
    """Noisy ids, loss, every token's CE, gradient norms and logits of the published training forward."""
    backbone = golden_backbone(model_folder)
    rows, mask = rows_of(case), torch.tensor(case["mask"]).bool()
    assert rows.supervised_tokens == case["labelled_tokens"]
    for keep_all in (True, False):
        objective = BlockDiffusion(meta["block_size"], meta["mask_token_id"], 0, backbone.layers - 1, False, keep_all)
        batch = objective.corrupted(rows, mask, range(case["batch"]))
        assert int(batch.weights.sum()) == case["scored_tokens"]
        backbone.model.zero_grad()
        loss = TrainingModel(backbone.model)(batch)
        loss.backward()
        reference = case["reference"]
        assert loss.item() == pytest.approx(reference["loss_sum"], rel=RELATIVE)
        assert loss.item() / rows.supervised_tokens == pytest.approx(reference["loss_per_labelled_token"], rel=RELATIVE)
        _assert_gradients(backbone, reference["grad_norms_of_loss_sum"])
        with torch.no_grad():
            ours = token_losses(backbone.model, batch)
        wanted = [ce for row in reference["ce"] for ce in row if ce is not None]
        assert sorted(ours.tolist()) == pytest.approx(sorted(wanted), abs=CE_ABSOLUTE, rel=RELATIVE)
        if keep_all:
            _assert_streams(backbone, batch, case, meta)


def _assert_gradients(backbone: Backbone, expected: dict[str, float]) -> None:
    gradients = {name: p.grad for name, p in backbone.model.named_parameters() if p.grad is not None}
    total = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
    for name, norm in expected.items():
        ours = total if name == "all_parameters" else gradients[name].norm()
        assert float(ours) == pytest.approx(norm, rel=GRADIENT), name


def _assert_streams(backbone: Backbone, batch: Any, case: dict[str, Any], meta: dict[str, Any]) -> None:
    """Noisy ids and logits stand where the full three streams have them."""
    block, length = meta["block_size"], case["length"]

    def slot(view: int, row: int, position: int) -> int:
        rank = row * (length // block) + position // block
        return int(batch.plan.clean + (rank * 2 + view - 1) * block + position % block)

    for view in (1, 2):
        for row, ids in enumerate(case[f"noisy_view{view}"]):
            at = [slot(view, row, p) for p in range(length)]
            assert batch.input_ids[0, at].tolist() == ids
    with torch.no_grad():
        states = hidden_states(backbone.model, batch)[0]
    for where, expected in zip(case["logits_at"], case["reference"]["logits"], strict=True):
        ours = backbone.model.lm_head(states[slot(where["view"], where["row"], where["position"])])
        assert_logits(ours.detach(), expected)


def kv_equivalence(case: dict[str, Any], meta: dict[str, Any], model_folder: Path) -> None:
    """A noisy block over its clean prefix: under the dense mask, and over the block cache as decoding does it."""
    backbone, block = golden_backbone(model_folder), meta["block_size"]
    prefix, noisy = case["prefix_ids"], case["noisy_block_ids"]
    with torch.no_grad():
        for logits in (_under_dense_mask, _over_cache):
            assert_block_logits(logits(backbone, prefix, noisy, block), case["reference"])


def _under_dense_mask(backbone: Backbone, prefix: list[int], noisy: list[int], block: int) -> torch.Tensor:
    total = len(prefix) + block
    tokens = stream_tokens(torch.zeros(total, dtype=torch.long), block, (CLEAN, NOISY_1))
    keep = torch.cat((torch.arange(len(prefix)), total + torch.arange(len(prefix), total)))
    allowed = dense(block_diffusion, tokens)[keep][:, keep]
    return logits_of(backbone.model, torch.tensor(prefix + noisy), torch.arange(total), allowed)[len(prefix) :]


def _over_cache(backbone: Backbone, prefix: list[int], noisy: list[int], block: int) -> torch.Tensor:
    total = len(prefix) + block
    table = np.arange(-(-total // block))[::-1].copy()
    cache = BlockCache(len(table), block, dtype=backbone.model.dtype, device=backbone.device)
    for ids, start in ((prefix, 0), (noisy, len(prefix))):
        where = torch.arange(start, start + len(ids))
        if ids:
            pieces = [Piece(0, len(ids), start, start + len(ids), block, table)]
            plan = DecodePlan(cache, pieces, torch.from_numpy(cache.where(table, where.numpy())))
            out = backbone.model(
                input_ids=torch.tensor([ids]), position_ids=where[None], use_cache=False, attention_plan=plan
            )
    logits: torch.Tensor = out.logits[0]
    return logits


def assert_block_logits(ours: torch.Tensor, reference: dict[str, Any]) -> None:
    assert ours.argmax(-1).tolist() == reference["argmax"]
    assert ours.softmax(-1).max(-1).values.tolist() == pytest.approx(reference["top1_prob"], rel=RELATIVE)
    assert ours.logsumexp(-1).tolist() == pytest.approx(reference["logsumexp"], rel=RELATIVE)
    assert ours.norm(dim=-1).tolist() == pytest.approx(reference["l2_norm"], rel=RELATIVE)
    for slot, expected in reference["logits"].items():
        assert_logits(ours[int(slot)], expected)


KINDS = {"training_forward": training_forward, "kv_equivalence": kv_equivalence}
