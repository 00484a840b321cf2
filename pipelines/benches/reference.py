"""The published form of the training step, made as fast as its shape allows: what `bench train` compares with.

For every data row two rows [noisy | clean] of 2L tokens, one a view, in one batch; a dense [2L, 2L] mask through
torch's scaled_dot_product_attention; the LM head over both noisy halves. The mask is made once a step and shared by
the layers. (`tests/oracles.py` has a slow and obvious form of the same, to test against.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from model.corruption import IGNORED, complementary_views
from model.layout import RowBatch
from model.masks import CLEAN, NOISY_1, TAIL, Tokens, block_diffusion, dense, stream_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DensePlan:
    """Attention under an additive mask that broadcasts to [B, H, T, T], by torch's SDPA."""

    bias: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        assert sliding_window is None, "the reference form has no sliding window"
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, scale=scale)


def dense_bias(tokens: Tokens, dtype: torch.dtype, device: str) -> Tensor:
    """Additive training mask [T, T] of T tokens."""
    allowed = dense(block_diffusion, Tokens(*(x.to(device) for x in tokens)))
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def reference_loss(model: PreTrainedModel, rows: RowBatch, mask: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """Sum of cross-entropy over both views, float32 (or float64). mask: bool [B, L], what view 1 masks."""
    device, length = str(model.device), rows.input_ids.shape[1]
    views = complementary_views(rows.input_ids, rows.labels, mask, mask_token_id)
    ids = torch.cat([torch.cat((view, rows.input_ids), 1) for view in views]).to(device)
    streams = [stream_tokens(documents, block_size, (NOISY_1, CLEAN)) for documents in rows.document_ids]
    bias = torch.stack([dense_bias(tokens, model.dtype, device) for tokens in streams])[:, None]
    out = model.get_decoder()(
        input_ids=ids,
        position_ids=rows.position_ids.repeat(2, 2).to(device),
        use_cache=False,
        attention_plan=DensePlan(bias if len(streams) == 1 else bias.repeat(2, 1, 1, 1)),
    )
    logits = model.get_output_embeddings()(out.last_hidden_state[:, :length])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.cat([_targets(rows, masked) for masked in (mask, ~mask)]).to(device)
    targets = functional.pad(targets[:, 1:], (0, 1), value=IGNORED)  # shifted, so that the logits need no copy
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _targets(rows: RowBatch, masked: Tensor) -> Tensor:
    """Labels [B, L] of one view: masked supervised tokens that the slot before them, in their document, predicts."""
    documents = rows.document_ids
    follows = torch.zeros_like(masked)
    follows[:, 1:] = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] != TAIL)
    return rows.labels.masked_fill(~(masked & follows), IGNORED)
