"""What is minimised, as plain functions over packed rows.

Block diffusion (METHOD section 1): sum of cross-entropy at masked supervised tokens over two complementary views, read
one slot to the left; no 1/t weight. Next token: the AR control on the same rows. The caller divides by the number of
supervised tokens of the *global* batch. `TrainingModel` is what DeepSpeed wraps: the loss is computed inside it, the
head runs once per forward on the predicted slots only, and a batch without supervised tokens gives 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from model.attention import StreamPlan
from model.corruption import complementary_views, draw_noise, row_generator
from model.errors import UserError
from model.layout import RowBatch, TrainingBatch, check_blocks, hash_batch, lay_out_causal, lay_out_streams
from model.masks import Tokens

OBJECTIVES = ("block_diffusion", "next_token")
HELD_OUT_EPOCH = -1  # the corruption of held-out rows never meets that of a training epoch


class Objective(Protocol):
    """Turns packed rows into a batch for one forward. Depends on (seed, sample id, epoch), not on topology."""

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TrainingBatch:
        """rows: B rows; sample_ids: their B global indices; epoch: 0-based pass over the data, one or one a row."""
        ...


@dataclass(frozen=True)
class BlockDiffusion:
    """Complementary masks, token shift, block attention (Fast-dLLM v2)."""

    block_size: int
    mask_token_id: int
    seed: int
    last_layer: int
    document_mask: bool = True
    keep_all: bool = False

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TrainingBatch:
        check_blocks(rows, self.block_size)
        length = rows.input_ids.shape[1]
        epochs = [epoch] * len(sample_ids) if isinstance(epoch, int) else epoch
        samples = zip(sample_ids, epochs, strict=True)
        noise = [draw_noise(length, self.block_size, row_generator(self.seed, *one))[1] for one in samples]
        return self.corrupted(rows, torch.stack(noise), sample_ids)

    def corrupted(self, rows: RowBatch, mask: Tensor, sample_ids: Sequence[int]) -> TrainingBatch:
        """The batch under a given mask: bool [B, L], True where view 1 masks a supervised token."""
        rows = rows if self.document_mask else rows.without_documents()
        views = complementary_views(rows.input_ids, rows.labels, mask, self.mask_token_id)
        return lay_out_streams(
            rows,
            mask,
            views,
            block_size=self.block_size,
            last_layer=self.last_layer,
            keep_all=self.keep_all,
            batch_hash=hash_batch(sample_ids, *views),
        )


@dataclass(frozen=True)
class NextToken:
    """Plain fine-tuning on the same rows: the paper's control."""

    block_size: int
    last_layer: int
    document_mask: bool = True

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TrainingBatch:
        rows = rows if self.document_mask else rows.without_documents()
        return lay_out_causal(
            rows,
            block_size=self.block_size,
            last_layer=self.last_layer,
            batch_hash=hash_batch(sample_ids, rows.input_ids),
        )


def make_objective(
    name: str, *, block_size: int, mask_token_id: int, seed: int, layers: int, document_mask: bool = True
) -> Objective:
    """name: one of OBJECTIVES. layers: the model's number of decoder layers. Raises UserError for another name."""
    if name == "block_diffusion":
        return BlockDiffusion(block_size, mask_token_id, seed, layers - 1, document_mask)
    if name == "next_token":
        return NextToken(block_size, layers - 1, document_mask)
    raise UserError(f"objective must be one of {', '.join(OBJECTIVES)}, not {name!r}.")


class TrainingModel(nn.Module):
    """A causal LM and its loss in one module, for DeepSpeed to wrap."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Sum of cross-entropy (nats, float32, or float64 in a float64 model) over the batch's predictions."""
        return (token_losses(self.causal_lm, batch) * batch.weights.to(batch.input_ids.device)).sum()


def token_losses(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Cross-entropy of each prediction, [N]."""
    logits = predicted_logits(causal_lm, batch)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide, batch.targets.to(logits.device), reduction="none")


def predicted_logits(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Logits [N, V] at the batch's slots; the head never sees any other position."""
    hidden = hidden_states(causal_lm, batch)
    head = causal_lm.get_output_embeddings()
    logits: Tensor = head(hidden[0].index_select(0, batch.slots.to(hidden.device)))
    return logits


def hidden_states(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Final hidden states [1, T, H] of the laid-out sequence."""
    decoder = causal_lm.get_decoder()
    out = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_plan=batch.plan,
    )
    states: Tensor = out.last_hidden_state
    return states


def to_device(batch: TrainingBatch, device: torch.device | str) -> TrainingBatch:
    """The batch with every tensor on `device`."""
    plan = batch.plan
    moved = StreamPlan(
        Tokens(*(x.to(device) for x in plan.tokens)), plan.clean, plan.block_size, plan.predicate, plan.last_layer
    )
    names = ("input_ids", "position_ids", "slots", "targets", "weights")
    return replace(batch, plan=moved, **{n: getattr(batch, n).to(device) for n in names})


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """eval() and no gradients, restored afterwards."""
    was = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was)


def held_out_loss(causal_lm: PreTrainedModel, objective: Objective, rows: Iterable[RowBatch]) -> float:
    """Masked loss on held-out rows: fixed seeded masks, both views; mean nats per supervised token.

    Rows are numbered in the order given, so the same rows get the same masks whatever their grouping. Raises UserError
    when nothing is supervised.
    """
    total, supervised, seen = 0.0, 0, 0
    with evaluating(causal_lm):
        for part in rows:
            count = part.input_ids.shape[0]
            batch = objective.batch(part, range(seen, seen + count), HELD_OUT_EPOCH)
            batch = to_device(batch, next(causal_lm.parameters()).device)
            total += float((token_losses(causal_lm, batch) * batch.weights.to(causal_lm.device)).sum())
            supervised, seen = supervised + batch.supervised_tokens, seen + count
    if not supervised:
        raise UserError("The held-out rows hold no supervised token: check that the data has assistant turns.")
    return total / supervised
