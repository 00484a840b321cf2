"""What is minimised, as plain functions over packed rows.

Block diffusion (METHOD section 1): sum of cross-entropy at masked supervised tokens over two complementary views, read
one slot to the left; no 1/t weight. Next token: the AR control on the same rows. The caller divides by the number of
supervised tokens of the *global* batch. `TrainingModel` is what DeepSpeed wraps: the loss is computed inside it, the
head runs once per forward on the predicted slots only, and a batch without supervised tokens gives 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from model.ablations import supervised_where, without_padding
from model.corruption import complementary_views, draw_noise, row_generator
from model.cross_entropy import LossHead
from model.errors import UserError
from model.layout import (
    RowBatch,
    TrainingBatch,
    causal_lengths,
    check_blocks,
    hash_batch,
    lay_out_causal,
    lay_out_streams,
    stream_lengths,
)
from model.masks import Tokens
from model.recurrence import Folded, is_recurrent, one_document_a_row, unclamp_time_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OBJECTIVES = ("block_diffusion", "next_token")
HELD_OUT_EPOCH = -1  # the corruption of held-out rows never meets that of a training epoch


class Objective(Protocol):
    """Turns packed rows into a batch for one forward. Depends on (seed, sample id, epoch), not on topology."""

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TrainingBatch:
        """rows: B rows; sample_ids: their B global indices; epoch: 0-based pass over the data, one or one a row."""
        ...

    def lengths(self, rows: RowBatch) -> Tensor:
        """Tokens that the network runs on for each row, int64 [B]: what a micro-batch of these rows costs."""
        ...


@dataclass(frozen=True)
class BlockDiffusion:
    """Complementary masks, token shift, block attention (Fast-dLLM v2).

    ar_loss_weight: above 0, the next-token loss of the same tokens is added with this weight, on a causal stream of its
    own. complementary_masks, document_padding: False for the paper's ablation; with one view only what it masks is
    supervised.
    """

    block_size: int
    mask_token_id: int
    seed: int
    last_layer: int
    document_mask: bool = True
    keep_all: bool = False
    complementary_masks: bool = True
    document_padding: bool = True
    ar_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.document_mask and not self.document_padding:
            raise UserError(
                "document_padding false puts two documents into one block, which document_mask true keeps apart: "
                "set document_mask to false as well."
            )
        if self.ar_loss_weight and not self.complementary_masks:
            raise UserError("ar_loss_weight needs complementary masks: set it to 0, or complementary_masks to true.")

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TrainingBatch:
        check_blocks(rows, self.block_size)
        length = rows.input_ids.shape[1]
        epochs = [epoch] * len(sample_ids) if isinstance(epoch, int) else epoch
        samples = zip(sample_ids, epochs, strict=True)
        noise = [draw_noise(length, self.block_size, row_generator(self.seed, *one)) for one in samples]
        ratios, masks = (torch.stack(drawn) for drawn in zip(*noise, strict=True))
        return self.corrupted(rows, masks, sample_ids, ratios)

    def corrupted(
        self, rows: RowBatch, mask: Tensor, sample_ids: Sequence[int], ratios: Tensor | None = None
    ) -> TrainingBatch:
        """The batch under a given mask: bool [B, L], True where view 1 masks a supervised token.

        ratios: float [B, L / K], the blocks' mask ratios, for `TrainingBatch.noise`.
        """
        rows = self._arranged(rows)
        views: Sequence[Tensor] = complementary_views(rows.input_ids, rows.labels, mask, self.mask_token_id)
        if not self.complementary_masks:
            rows, views = supervised_where(rows, mask), views[:1]
        return lay_out_streams(
            rows,
            mask,
            views,
            block_size=self.block_size,
            last_layer=self.last_layer,
            keep_all=self.keep_all,
            causal_weight=self.ar_loss_weight,
            batch_hash=hash_batch(sample_ids, *views),
            ratios=ratios,
        )

    def lengths(self, rows: RowBatch) -> Tensor:
        """With one view an upper bound: what it will not mask is not yet left out."""
        views = 2 if self.complementary_masks else 1
        arranged = self._arranged(rows)
        return stream_lengths(arranged, self.block_size, views=views, causal_stream=self.ar_loss_weight > 0)

    def _arranged(self, rows: RowBatch) -> RowBatch:
        rows = rows if self.document_padding else without_padding(rows, self.mask_token_id)
        return rows if self.document_mask else rows.without_documents()


@dataclass(frozen=True)
class NextToken:
    """Plain fine-tuning on the same rows: the paper's control."""

    block_size: int
    last_layer: int
    document_mask: bool = True

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TrainingBatch:
        rows = self._arranged(rows)
        return lay_out_causal(
            rows,
            block_size=self.block_size,
            last_layer=self.last_layer,
            batch_hash=hash_batch(sample_ids, rows.input_ids),
        )

    def lengths(self, rows: RowBatch) -> Tensor:
        return causal_lengths(self._arranged(rows), self.block_size)

    def _arranged(self, rows: RowBatch) -> RowBatch:
        return rows if self.document_mask else rows.without_documents()


def make_objective(
    name: str,
    *,
    block_size: int,
    mask_token_id: int,
    seed: int,
    layers: int,
    document_mask: bool = True,
    complementary_masks: bool = True,
    document_padding: bool = True,
    ar_loss_weight: float = 0.0,
) -> Objective:
    """name: one of OBJECTIVES. layers: the model's number of decoder layers. The other options are BlockDiffusion's.

    Raises UserError for another name, and for options that the objective has not.
    """
    if name == "block_diffusion":
        return BlockDiffusion(
            block_size,
            mask_token_id,
            seed,
            layers - 1,
            document_mask,
            complementary_masks=complementary_masks,
            document_padding=document_padding,
            ar_loss_weight=ar_loss_weight,
        )
    if name == "next_token":
        if not complementary_masks or not document_padding or ar_loss_weight:
            raise UserError(
                "complementary_masks, document_padding and ar_loss_weight belong to block_diffusion: "
                "leave them out with the objective next_token."
            )
        return NextToken(block_size, layers - 1, document_mask)
    raise UserError(f"objective must be one of {', '.join(OBJECTIVES)}, not {name!r}.")


class TrainingModel(nn.Module):
    """A causal LM and its loss in one module, for DeepSpeed to wrap.

    observe: is shown every batch with the cross-entropy of each of its predictions, [N], detached; it changes nothing.
    """

    def __init__(self, causal_lm: PreTrainedModel, observe: Callable[[TrainingBatch, Tensor], None] | None = None):
        super().__init__()
        head = causal_lm.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(causal_lm).__name__} has no linear head over its vocabulary: it cannot be trained.")
        causal_lm.set_output_embeddings(LossHead.in_place_of(head))
        self.causal_lm = causal_lm
        self.observe = observe

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Sum of cross-entropy (nats, float32, or float64 in a float64 model) over the batch's predictions."""
        states = predicting_states(self.causal_lm, batch)
        targets, weights = batch.targets.to(states.device), batch.weights.to(states.device)
        head, softcap = self.causal_lm.get_output_embeddings(), logit_cap(self.causal_lm)
        total, losses = head(states, targets, weights, softcap)
        if self.observe is not None:
            self.observe(batch, losses)
        loss: Tensor = total
        return loss


def token_losses(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Cross-entropy of each prediction, [N]; without gradients."""
    head = LossHead.in_place_of(causal_lm.get_output_embeddings())
    with torch.no_grad():
        states = predicting_states(causal_lm, batch)
        losses: Tensor = head(states, batch.targets.to(states.device), None, logit_cap(causal_lm))[1]
    return losses


def predicted_logits(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Logits [N, V] at the batch's slots; the head never sees any other position."""
    logits: Tensor = causal_lm.get_output_embeddings()(predicting_states(causal_lm, batch))
    softcap = logit_cap(causal_lm)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def predicting_states(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Final hidden states [N, H] at the batch's slots: what its predictions are read from."""
    if is_recurrent(causal_lm):
        unclamp_time_steps(causal_lm)
        batch = one_document_a_row(batch)
    hidden = hidden_states(causal_lm, batch)
    states = hidden.flatten(0, 1).index_select(0, batch.slots.to(hidden.device))
    factor = logit_factor(causal_lm)
    return states if factor == 1 else states * factor


def logit_factor(causal_lm: PreTrainedModel) -> float:
    """What a model multiplies its head's outputs by: Falcon-H1 and Cohere name the factor, Granite what it divides by.

    The head is linear, so its inputs may be multiplied instead.
    """
    config = causal_lm.config.get_text_config()
    factor = getattr(config, "lm_head_multiplier", None) or getattr(config, "logit_scale", None) or 1.0
    return float(factor) / float(getattr(config, "logits_scaling", None) or 1.0)


def logit_cap(causal_lm: PreTrainedModel) -> float | None:
    """The cap of a model whose logits are cap * tanh(logit / cap) (Gemma 2), else None."""
    softcap = getattr(causal_lm.config.get_text_config(), "final_logit_softcapping", None)
    return None if softcap is None else float(softcap)


def hidden_states(causal_lm: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """Final hidden states [1, T, H] of the laid-out sequence, or [D, n, H] of a batch of one document a row."""
    decoder = causal_lm.get_decoder()
    folded = batch.input_ids.shape[0] > 1
    out = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_plan=Folded(batch.plan) if folded else batch.plan,
    )
    states: Tensor = out.last_hidden_state
    return states


def to_device(batch: TrainingBatch, device: torch.device | str) -> TrainingBatch:
    """The batch with every tensor on `device`."""
    plan = batch.plan
    moved = replace(plan, tokens=Tokens(*(x.to(device) for x in plan.tokens)))
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
