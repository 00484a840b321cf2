"""From packed rows to one training sequence that holds only what the loss can feel.

The published step runs [noisy | clean] twice, 4L tokens for L tokens of data; three streams give the same numbers for
3L. Here every row is cut further, still without changing loss or gradients by a bit of mathematics:
  - a noisy block is kept only if some loss reads it: it holds a supervised token (past its first slot), or the next
    block of its document begins with one (the token shift reads that from this block's last slot);
  - a clean block is kept only if a kept noisy block of its document comes after it.
All rows are laid into one sequence [clean blocks | noisy blocks], so rows of any make-up waste nothing.
`keep_all=True` gives the plain three streams, for tests and benches.

Letters: B rows, L row length, K block, T tokens laid out, N supervised predictions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.attention import StreamPlan
from model.corruption import IGNORED
from model.errors import UserError
from model.masks import CAUSAL, CLEAN, NOISY_1, TAIL, Tokens, block_diffusion, block_diffusion_beside_causal, causal

HASH_BITS = 64


@dataclass(frozen=True)
class RowBatch:
    """Packed rows, int64 [B, L] each. labels: -100 = no loss, not shifted. document_ids: -1 = the row's tail."""

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor
    position_ids: Tensor

    def __post_init__(self) -> None:
        shapes = {tuple(x.shape) for x in (self.input_ids, self.labels, self.document_ids, self.position_ids)}
        if len(shapes) != 1 or self.input_ids.dim() != 2:
            raise UserError(f"Packed rows must be four equal [rows, length] arrays, not {sorted(shapes)}.")

    @property
    def supervised_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())

    def without_documents(self) -> RowBatch:
        """The reference's view of a row: one document, positions 0 .. L-1."""
        positions = torch.arange(self.input_ids.shape[1]).expand_as(self.input_ids)
        return RowBatch(self.input_ids, self.labels, torch.zeros_like(self.document_ids), positions)


@dataclass(frozen=True)
class TrainingBatch:
    """One forward's worth: input_ids, position_ids [1, T]; slot and target [N]: logits of slot predict target.

    weights [N] is 1 for a real prediction (in a causal stream beside the views the weight of its loss); a batch without
    any carries one of weight 0, so that every rank runs the same modules. supervised_tokens counts labels (a document's
    first token has no prediction but counts). rows [N]: the row of the batch that each prediction belongs to.
    noise [N]: the mask ratio of each prediction's block in the view that masks it, t or 1 - t, in [0, 1]; NaN where
    nothing is masked for it; None where the batch was not told. Nothing is computed from it, it sorts losses.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: StreamPlan
    slots: Tensor
    targets: Tensor
    weights: Tensor
    rows: Tensor
    supervised_tokens: int
    batch_hash: str
    noise: Tensor | None = None

    @property
    def scored_tokens(self) -> int:
        """What the loss of the global batch is a mean over."""
        return self.supervised_tokens

    @property
    def bound_weights(self) -> None:
        """What each prediction counts in a bound of the likelihood: no such bound is known of these objectives."""

    @property
    def tokens(self) -> int:
        """Tokens the network runs on."""
        return int(self.input_ids.shape[1])


@dataclass(frozen=True)
class _Blocks:
    """Per-block facts of a batch, [B, L / K]."""

    document: Tensor
    supervised: Tensor  # any supervised token past the block's first slot
    head: Tensor  # the first slot is supervised and something predicts it
    follows: Tensor  # the block before belongs to the same document


def lay_out_streams(
    rows: RowBatch,
    mask: Tensor,
    views: Sequence[Tensor],
    *,
    block_size: int,
    last_layer: int,
    keep_all: bool = False,
    causal_weight: float = 0.0,
    batch_hash: str = "",
    ratios: Tensor | None = None,
) -> TrainingBatch:
    """The block-diffusion sequence of `rows`. mask: bool [B, L], what view 1 masks; views: the one or two noisy [B, L].

    With one view every supervised token must be masked in it. causal_weight: above 0 a causal stream is laid beside the
    clean one, and its next-token predictions are added with this weight.
    ratios: float [B, L / K], each block's mask ratio t in view 1, if the batch shall tell its predictions' noise.
    """
    blocks = _blocks(rows, block_size)
    noisy, clean = _kept(blocks, keep_all)
    beside = _read_causally(blocks) if causal_weight else torch.zeros_like(clean)
    clean_at, causal_at, noisy_at = (kept.flatten().nonzero()[:, 0] for kept in (clean, beside, noisy))
    noisy_at = noisy_at.repeat_interleave(len(views))
    view = torch.arange(len(noisy_at)) % len(views)
    order = torch.cat((clean_at, causal_at, noisy_at))
    stream = torch.cat((torch.full_like(clean_at, CLEAN), torch.full_like(causal_at, CAUSAL), view + NOISY_1))
    unread, attended = len(clean_at) * block_size, (len(clean_at) + len(causal_at)) * block_size
    plan = StreamPlan(
        tokens=_tokens(rows, blocks, order, stream, block_size),
        clean=attended,
        block_size=block_size,
        predicate=block_diffusion_beside_causal if causal_weight else block_diffusion,
        last_layer=last_layer,
        unread=unread,
    )
    slots, targets = _shifted_targets(rows, mask, blocks, noisy, attended, len(views))
    weights = torch.ones(len(slots))
    if causal_weight:
        more, further = _next_targets(rows, blocks, causal_at, unread, block_size)
        slots, targets = torch.cat((slots, more)), torch.cat((targets, further))
        weights = torch.cat((weights, torch.full((len(more),), causal_weight)))
    ids = torch.stack((views[0], views[-1], rows.input_ids, rows.input_ids))
    ids = _as_blocks(ids, block_size)[stream, order]
    batch = _batch(ids, order, plan, slots, targets, weights, rows, batch_hash)
    return batch if ratios is None else replace(batch, noise=_noise_of(rows, mask, blocks, ratios, len(batch.slots)))


def lay_out_causal(rows: RowBatch, *, block_size: int, last_layer: int, batch_hash: str = "") -> TrainingBatch:
    """The next-token sequence of `rows` (the AR control): every document up to its last supervised token's block."""
    blocks = _blocks(rows, block_size)
    keep = _read_causally(blocks)
    order = (keep | _dummy(keep)).flatten().nonzero()[:, 0]
    plan = StreamPlan(
        tokens=_tokens(rows, blocks, order, torch.full_like(order, CLEAN), block_size),
        clean=len(order) * block_size,
        block_size=block_size,
        predicate=causal,
        last_layer=last_layer,
    )
    slots, targets = _next_targets(rows, blocks, order, 0, block_size)
    ids = _as_blocks(rows.input_ids[None], block_size)[0, order]
    return _batch(ids, order, plan, slots, targets, torch.ones(len(slots)), rows, batch_hash)


def stream_lengths(rows: RowBatch, block_size: int, *, views: int, causal_stream: bool) -> Tensor:
    """Tokens that `lay_out_streams` lays out for each row, int64 [B]."""
    blocks = _blocks(rows, block_size)
    noisy, clean = _kept(blocks, keep_all=False)
    count = views * noisy.sum(1) + clean.sum(1)
    return block_size * (count + _read_causally(blocks).sum(1) if causal_stream else count)


def causal_lengths(rows: RowBatch, block_size: int) -> Tensor:
    """Tokens that `lay_out_causal` lays out for each row, int64 [B]."""
    return block_size * _read_causally(_blocks(rows, block_size)).sum(1)


def hash_batch(sample_ids: Sequence[int], *ids: Tensor) -> str:
    """Names the samples and their corruption: equal hashes mean equal training input. ids: [B, L] each.

    A sum over rows, so that the micro-batches of a global batch add up to its hash however it was divided.
    """
    return combine_hashes(_hash_row(sample, [x[row] for x in ids]) for row, sample in enumerate(sample_ids))


def combine_hashes(hashes: Iterable[str]) -> str:
    """The hash of several batches together, whatever their order."""
    return f"{sum(int(one, 16) for one in hashes) % (1 << HASH_BITS):016x}"


def _hash_row(sample: int, ids: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(str(sample).encode(), digest_size=HASH_BITS // 8)
    for tensor in ids:
        digest.update(tensor.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def check_blocks(rows: RowBatch, block_size: int) -> None:
    """Raises UserError unless rows divide into blocks and no block holds two documents."""
    if rows.input_ids.shape[1] % block_size:
        raise UserError(
            f"Rows of {rows.input_ids.shape[1]} tokens do not divide into blocks of {block_size}: "
            "pack them again with this block size."
        )
    documents = rows.document_ids.unflatten(1, (-1, block_size))
    if (documents != documents[..., :1]).any():
        raise UserError(
            f"A block of {block_size} tokens holds two documents: "
            "the rows were packed with another block size, pack them again."
        )


def _blocks(rows: RowBatch, block_size: int) -> _Blocks:
    check_blocks(rows, block_size)
    documents = rows.document_ids.unflatten(1, (-1, block_size))
    supervised = (rows.labels != IGNORED).unflatten(1, (-1, block_size))
    document = documents[..., 0]
    follows = torch.zeros_like(document, dtype=torch.bool)
    follows[:, 1:] = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] != TAIL)
    return _Blocks(document, supervised[..., 1:].any(-1), supervised[..., 0] & follows, follows)


def _kept(blocks: _Blocks, keep_all: bool) -> tuple[Tensor, Tensor]:
    """Which noisy and which clean blocks stay, bool [B, L / K] each."""
    if keep_all:
        every = torch.ones_like(blocks.supervised)
        return every, every
    noisy = blocks.supervised | _shift_left(blocks.head)
    noisy = noisy | _dummy(noisy)
    return noisy, _until_last(noisy, blocks) & ~_last_of(noisy, blocks)


def _shift_left(flags: Tensor) -> Tensor:
    return torch.cat((flags[:, 1:], torch.zeros_like(flags[:, :1])), 1)


def _dummy(kept: Tensor) -> Tensor:
    """Something to run on when nothing is supervised: the first block."""
    first = torch.zeros_like(kept)
    first[0, 0] = not bool(kept.any())
    return first


def _read_causally(blocks: _Blocks) -> Tensor:
    """Blocks that next-token predictions need, bool [B, L / K]: each document up to its last supervised token."""
    return _until_last(blocks.supervised | blocks.head, blocks)


def _until_last(flags: Tensor, blocks: _Blocks) -> Tensor:
    """True from each document's first block to its last flagged one."""
    reached = flags.clone()
    for column in range(flags.shape[1] - 2, -1, -1):
        reached[:, column] |= reached[:, column + 1] & blocks.follows[:, column + 1]
    return reached


def _last_of(flags: Tensor, blocks: _Blocks) -> Tensor:
    """True at each document's last flagged block."""
    reached = _until_last(flags, blocks)
    goes_on = _shift_left(reached & blocks.follows)
    return flags & ~goes_on


def _tokens(rows: RowBatch, blocks: _Blocks, order: Tensor, stream: Tensor, block_size: int) -> Tokens:
    """Facts of each laid-out token. Document ids are made unique across rows; every tail block is its own.

    A document of the causal stream is another than that of the clean one: it has keys and values of its own.
    """
    rows_count, count = blocks.document.shape
    row, block = order // count, order % count
    document = blocks.document.flatten()[order]
    stride = int(blocks.document.max()) + 2
    copy = row + rows_count * (stream == CAUSAL)
    unique = torch.where(document == TAIL, -2 - order, copy * stride + document)
    position = block[:, None] * block_size + torch.arange(block_size)
    spread = lambda x: x.repeat_interleave(block_size)  # noqa: E731
    return Tokens(spread(stream), spread(unique), spread(block), position.flatten())


def _predicted(rows: RowBatch, blocks: _Blocks, block_size: int) -> tuple[Tensor, Tensor]:
    """(row, position) of every supervised token that something predicts: all but a document's first."""
    supervised = (rows.labels != IGNORED).unflatten(1, (-1, block_size)).clone()
    supervised[..., 0] &= blocks.follows
    row, position = supervised.flatten(1).nonzero(as_tuple=True)
    return row, position


def _shifted_targets(
    rows: RowBatch, mask: Tensor, blocks: _Blocks, noisy: Tensor, offset: int, views: int
) -> tuple[Tensor, Tensor]:
    """Slots [N] of the laid-out sequence whose logits predict targets [N]: one to the left, in the masking view."""
    length = rows.input_ids.shape[1]
    block_size = length // noisy.shape[1]
    row, position = _predicted(rows, blocks, block_size)
    rank = noisy.flatten().cumsum(0) - 1
    source = row * length + position - 1
    view = torch.where(mask[row, position], 0, 1)
    slots = offset + (rank[source // block_size] * views + view) * block_size + source % block_size
    return slots, rows.labels[row, position]


def _next_targets(
    rows: RowBatch, blocks: _Blocks, order: Tensor, offset: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Slots [N] and targets [N] of a causal stream that holds the blocks `order` from `offset` on."""
    where = torch.full((blocks.document.numel(),), -1).scatter(0, order, torch.arange(len(order)))
    row, position = _predicted(rows, blocks, block_size)
    source = row * rows.input_ids.shape[1] + position - 1
    return offset + where[source // block_size] * block_size + source % block_size, rows.labels[row, position]


def _as_blocks(ids: Tensor, block_size: int) -> Tensor:
    """[S, B, L] as [S, B * L / K, K]."""
    return ids.unflatten(2, (-1, block_size)).flatten(1, 2)


def _noise_of(rows: RowBatch, mask: Tensor, blocks: _Blocks, ratios: Tensor, count: int) -> Tensor:
    """How noisy each prediction's block is in the view that masks it: view 2 masks what view 1 does not.

    [count], the masked predictions first; what the others, of a causal stream, have before them is no noise.
    """
    block_size = mask.shape[1] // ratios.shape[1]
    row, position = _predicted(rows, blocks, block_size)
    t = ratios[row, position // block_size]
    noise = torch.full((count,), torch.nan)
    noise[: len(row)] = torch.where(mask[row, position], t, 1 - t)
    return noise


def _batch(
    ids: Tensor,
    order: Tensor,
    plan: StreamPlan,
    slots: Tensor,
    targets: Tensor,
    weights: Tensor,
    rows: RowBatch,
    batch_hash: str,
) -> TrainingBatch:
    """ids: int64 [blocks, K] of the laid-out blocks, which stand at `order` in the rows."""
    if not len(slots):
        slots, targets, weights = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.zeros(1)
    return TrainingBatch(
        input_ids=ids.flatten()[None],
        position_ids=_as_blocks(rows.position_ids[None], plan.block_size)[0, order].flatten()[None],
        plan=plan,
        slots=slots,
        targets=targets,
        weights=weights,
        rows=order[slots // plan.block_size] // (rows.input_ids.shape[1] // plan.block_size),
        supervised_tokens=rows.supervised_tokens,
        batch_hash=batch_hash,
    )
