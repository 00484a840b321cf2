"""What the paper's ablation (Fast-dLLM v2, table 2) leaves out, as changes of packed rows.

The naive token shift has no padding between documents, so a block may hold the end of one and the beginning of the
next, and no complementary masks, so only what one view masks is learnt from a row. Both act on the rows that training
has, so an ablation sees the same samples in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.corruption import IGNORED
from model.layout import RowBatch
from model.masks import TAIL


def without_padding(rows: RowBatch, mask_token_id: int) -> RowBatch:
    """Every row's documents moved together, one directly behind the other; the row's tail grows by their padding.

    Padding is what a document ends in: mask tokens without a label.
    """
    within = rows.document_ids != TAIL
    numbers = torch.arange(len(rows.input_ids))[:, None] * (int(rows.document_ids.max()) + 1) + rows.document_ids
    document = torch.where(within, numbers, 0)
    place = torch.arange(rows.input_ids.shape[1]).expand_as(rows.input_ids)
    filled = within & ((rows.input_ids != mask_token_id) | (rows.labels != IGNORED))
    last = torch.full((int(document.max()) + 1,), -1)
    last = last.scatter_reduce(0, document[filled], place[filled], "amax")
    stays = within & (place <= last[document])
    order = torch.argsort(~stays, dim=1, stable=True)
    tail = ~stays.gather(1, order)
    return RowBatch(
        rows.input_ids.gather(1, order).masked_fill(tail, mask_token_id),
        rows.labels.gather(1, order).masked_fill(tail, IGNORED),
        rows.document_ids.gather(1, order).masked_fill(tail, TAIL),
        rows.position_ids.gather(1, order).masked_fill(tail, 0),
    )


def supervised_where(rows: RowBatch, mask: Tensor) -> RowBatch:
    """The rows with labels only where `mask`, bool [B, L], is True."""
    labels = torch.where(mask, rows.labels, IGNORED)
    return RowBatch(rows.input_ids, labels, rows.document_ids, rows.position_ids)
