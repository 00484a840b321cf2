"""The training pass: one causal pass of the frozen context tower, one pass of the denoiser over all noisy blocks.

The denoiser has L queries over 2L keys: each block sees the context's keys and values before it, and itself. Labels
stand at the same position (no token shift), unless the model's config asks for one. Loss: cross-entropy at masked
positions; the caller divides the sum by the number of masked positions in the *global* batch. Training drops the
bound's weight 1/t; `held_out_bound` has it.
Source: TwoTower (arXiv 2606.26493); Megatron-LM's masked training loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import AttentionPlan
from model.errors import UserError
from model.layout import RowBatch
from model.objective import HELD_OUT_EPOCH, evaluating
from model.two_tower.boundaries import Boundaries
from model.two_tower.layout import TwoTowerBatch, draw_corruption, lay_out_two_tower, tower_lengths
from model.two_tower.prefix import KeysValues, beside, recording
from model.two_tower.recurrent import States
from model.two_tower.towers import ContextTower, Denoised, Denoiser, TwoTower


@dataclass(frozen=True)
class ContextStates:
    """What the context tower read: keys and values of every layer, and recurrent states before every block.

    logits: [M, V] where asked for, in the order of `tensor[keep]`.
    """

    kept: KeysValues
    seeds: States
    logits: Tensor


def read_context(
    context: ContextTower, batch: TwoTowerBatch, *, fold: bool = True, keep: Tensor | None = None
) -> ContextStates:
    """One pass without gradients. fold: see `Boundaries`. keep: bool [R, n], where logits are wanted."""
    batch = batch.to(context.device)
    known = context.causal_lm.get_input_embeddings().num_embeddings
    ids = batch.context_ids.masked_fill(batch.context_ids >= known, 0)  # padding with a mask that it does not know
    plan = recording(batch.context_documents.flatten(), batch.context_positions.flatten())
    if keep is None:
        keep = torch.zeros_like(batch.context_ids, dtype=torch.bool)
        keep[0, 0] = True  # the head has nothing to say here, but every rank of ZeRO must run it
    cache = context.cache({}, 2)
    if cache is None:
        logits = context.read(ids, batch.context_positions, plan, None, keep)
        return ContextStates(plan.kept, {}, logits)
    boundaries = Boundaries(context.causal_lm, batch.block_row, batch.block_offset, fold=fold)
    with boundaries.watching(cache):
        logits = context.read(ids, batch.context_positions, plan, cache, keep)
    return ContextStates(plan.kept, boundaries.states, logits)


class TwoTowerTraining(nn.Module):
    """The denoiser and its loss in one module, for DeepSpeed to wrap; the context tower stays outside.

    balance: weight of the experts' load-balancing loss, per masked position like the rest of the sum; 0 is off, and so
    is eval mode. observe: is shown every batch with the cross-entropy of each of its predictions, [M], detached; it
    changes nothing.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        balance: float = 0.0,
        observe: Callable[[TwoTowerBatch, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.balance = balance
        self.observe = observe
        if denoiser.scores:
            denoiser.prepare_to_score()

    def forward(self, batch: TwoTowerBatch, states: ContextStates) -> Tensor:
        """Sum of cross-entropy (nats, float32, or float64 in a float64 model) over the batch's masked positions."""
        balancing = self.training and self.balance > 0
        if self.denoiser.scores and not balancing:
            loss, losses = self.denoiser.score(*_inputs(self.denoiser, batch, states), batch.targets[batch.masked])
        else:
            out = denoise(self.denoiser, batch, states, balance=balancing)
            losses = cross_entropy(out.logits, batch)
            loss = losses.sum()
            if out.balance is not None:
                loss = loss + self.balance * batch.scored_tokens * out.balance
        if self.observe is not None:
            self.observe(batch, losses.detach())
        return loss * batch.weight


def denoise(
    denoiser: Denoiser,
    batch: TwoTowerBatch,
    states: ContextStates,
    keep: Tensor | None = None,
    *,
    balance: bool = False,
) -> Denoised:
    """Logits of the masked positions, or those at `keep`, bool [N, S]; in the order of `tensor[keep]`."""
    out: Denoised = denoiser(*_inputs(denoiser, batch, states, keep), balance)
    return out


class _Inputs(NamedTuple):
    """What a denoiser's forward is told, in its order."""

    ids: Tensor
    positions: Tensor
    times: Tensor
    time_index: Tensor
    plan: AttentionPlan
    seeds: States
    keep: Tensor


def _inputs(denoiser: Denoiser, batch: TwoTowerBatch, states: ContextStates, keep: Tensor | None = None) -> _Inputs:
    batch = batch.to(denoiser.device)
    plan = beside(
        states.kept,
        batch.context_documents.flatten(),
        batch.context_positions.flatten(),
        batch.block_document,
        batch.block_start,
        batch.stream,
        batch.noisy_ids.shape[1],
    )
    keep = batch.scored if keep is None else keep
    return _Inputs(batch.noisy_ids, batch.positions, batch.times, batch.time_index, plan, states.seeds, keep)


def token_losses(denoiser: Denoiser, batch: TwoTowerBatch, states: ContextStates) -> Tensor:
    """Cross-entropy of each masked position, [M]; the mask token stays in the softmax."""
    return cross_entropy(denoise(denoiser, batch, states).logits, batch)


def cross_entropy(logits: Tensor, batch: TwoTowerBatch) -> Tensor:
    """Of logits [M, V] at the batch's masked positions, [M]."""
    targets = batch.targets.to(logits.device)[batch.masked.to(logits.device)]
    return functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none"
    )


@dataclass(frozen=True)
class TwoTowerObjective:
    """Packed rows to batches. Depends on (seed, sample id, epoch), not on topology.

    complementary_masks: each block in two views, as Fast-dLLM v2 trains, so that every supervised token is scored once.
    keep_all: also blocks in which nothing is masked.
    """

    block_size: int
    mask_token_id: int
    seed: int
    document_rows: bool
    token_shift: bool = False
    complementary_masks: bool = False
    keep_all: bool = False

    @property
    def measured(self) -> TwoTowerObjective:
        """What held-out figures are of: one view, and with a token shift every block's first token."""
        return replace(self, complementary_masks=False, keep_all=self.token_shift)

    def lengths(self, rows: RowBatch) -> Tensor:
        """Tokens that both towers run on for each row, at most: int64 [B]."""
        return tower_lengths(rows, self.block_size, views=1 + self.complementary_masks)

    def batch(self, rows: RowBatch, sample_ids: Sequence[int], epoch: int | Sequence[int]) -> TwoTowerBatch:
        epochs = [epoch] * len(sample_ids) if isinstance(epoch, int) else epoch
        return lay_out_two_tower(
            rows,
            draw_corruption(rows, self.seed, sample_ids, epochs),
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            document_rows=self.document_rows,
            token_shift=self.token_shift,
            complementary=self.complementary_masks,
            keep_all=self.keep_all,
            sample_ids=sample_ids,
        )


@dataclass(frozen=True)
class HeldOut:
    """Held-out figures in nats. loss: mean cross-entropy at masked positions, as trained.

    bound: of the negative log-likelihood per supervised token, each masked position weighted by 1/t: its exponential is
    the perplexity's upper bound. With a token shift each block's first token counts with the context tower's loss.
    loss_by_t: mean loss of masked positions in ten equal stretches of t, None where none.
    """

    loss: float
    bound: float
    loss_by_t: list[float | None]


def held_out_bound(towers: TwoTower, objective: TwoTowerObjective, rows: Iterable[RowBatch]) -> HeldOut:
    """Fixed, seeded times and masks; the same rows get the same ones whatever their grouping.

    Raises UserError when nothing is supervised.
    """
    denoiser, objective = towers.writer(), objective.measured
    sums, counts = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    bound, supervised, seen = 0.0, 0, 0
    with evaluating(denoiser):
        for part in rows:
            count = part.input_ids.shape[0]
            batch = objective.batch(part, range(seen, seen + count), HELD_OUT_EPOCH)
            seen, supervised = seen + count, supervised + batch.supervised_tokens
            if not batch.weight:
                continue
            states, heads = read_measured(towers, batch)
            bound += heads
            if not batch.scored.any():
                continue
            losses = token_losses(denoiser, batch, states).double().cpu()
            t = batch.noise.double()
            bound += float((losses / t).sum())
            bucket = (t * 10).long().clamp(max=9)
            sums += torch.zeros_like(sums).scatter_add(0, bucket, losses)
            counts += torch.bincount(bucket, minlength=10)
    if not supervised:
        raise UserError("The held-out rows hold no supervised token: check that the data has assistant turns.")
    by_t = [float(s / c) if c else None for s, c in zip(sums, counts, strict=True)]
    return HeldOut(float(sums.sum() / counts.sum().clamp(min=1)), bound / supervised, by_t)


def read_measured(towers: TwoTower, batch: TwoTowerBatch) -> tuple[ContextStates, float]:
    """The context of a batch of `TwoTowerObjective.measured`, and with a token shift the sum of the context tower's own
    losses (nats) of the blocks' first tokens, else 0."""
    if not towers.config.token_shift:
        return read_context(towers.context, batch), 0.0
    before = before_blocks(batch)
    states = read_context(towers.context, batch, keep=before)
    return states, batch.weight * float(head_losses(states.logits, batch, before).sum())


def before_blocks(batch: TwoTowerBatch) -> Tensor:
    """Bool [R, n]: the context's tokens that stand right before a block."""
    follows = batch.block_offset > 0
    keep = torch.zeros_like(batch.context_ids, dtype=torch.bool)
    keep[batch.block_row[follows], batch.block_offset[follows] - 1] = True
    return keep


def head_losses(logits: Tensor, batch: TwoTowerBatch, keep: Tensor) -> Tensor:
    """Cross-entropy of the first token of each block that something stands before, float64 [M]; logits: those of
    `before_blocks`."""
    batch, keep = batch.to("cpu"), keep.cpu()
    follows = batch.block_offset > 0
    place = (keep.flatten().cumsum(0).view_as(keep) - 1)[batch.block_row[follows], batch.block_offset[follows] - 1]
    return functional.cross_entropy(logits.double().cpu()[place], batch.targets[follows, 0], reduction="none")
