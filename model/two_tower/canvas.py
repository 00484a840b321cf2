"""The denoiser's forward over rows of canvases, padded so that a row's numbers do not hang on its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention import AttentionPlan
from model.decoding.packing import ROUND_TO
from model.two_tower.recurrent import States
from model.two_tower.towers import Denoiser


def denoise(
    denoiser: Denoiser, canvases: Tensor, positions: Tensor, times: Tensor, plan: AttentionPlan, seeds: States
) -> Tensor:
    """Logits [R, S, V] of canvases int64 [R, S] at times [R]; plan and seeds as `Denoiser.forward` takes them, the
    seeds with rows for the padding (`extra_rows`)."""
    rows, count = canvases.shape
    extra = extra_rows(rows, count)
    ids, where = (torch.cat((x, x.new_zeros((extra, count)))) for x in (canvases, positions))
    index = torch.arange(rows + extra).clamp(max=rows - 1)
    keep = torch.ones((rows + extra, count), dtype=torch.bool)
    with torch.no_grad():
        logits: Tensor = denoiser(ids, where, times, index, plan, seeds, keep).logits
    return logits.view(rows + extra, count, -1)[:rows]


def extra_rows(rows: int, count: int) -> int:
    """Rows of padding that make the tokens of a forward of `rows` by `count` a multiple of ROUND_TO."""
    extra = 0
    while (rows + extra) * count % ROUND_TO:
        extra += 1
    return extra
