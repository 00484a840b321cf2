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
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention import StreamPlan
from model.corruption import IGNORED
from model.errors import UserError
from model.masks import CLEAN, NOISY_1, TAIL, Tokens, block_diffusion, causal

VIEWS = 2
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

    weights [N] is 1 for a real prediction; a batch without any carries one of weight 0, so that every rank runs the
    same modules. supervised_tokens counts labels (a document's first token has no prediction but counts).
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: StreamPlan
    slots: Tensor
    targets: Tensor
    weights: Tensor
    supervised_tokens: int
    batch_hash: str

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
    views: tuple[Tensor, Tensor],
    *,
    block_size: int,
    last_layer: int,
    keep_all: bool = False,
    batch_hash: str = "",
) -> TrainingBatch:
    """The block-diffusion sequence of `rows`. mask: bool [B, L], what view 1 masks; views: the two noisy [B, L]."""
    blocks = _blocks(rows, block_size)
    noisy, clean = _kept(blocks, keep_all)
    clean_at, noisy_at = clean.flatten().nonzero()[:, 0], noisy.flatten().nonzero()[:, 0]
    noisy_at = noisy_at.repeat_interleave(VIEWS)
    view = torch.arange(len(noisy_at)) % VIEWS
    token_ids = torch.stack((views[0], views[1], rows.input_ids)).unflatten(2, (-1, block_size)).flatten(1, 2)
    order = torch.cat((clean_at, noisy_at))
    stream = torch.cat((torch.full_like(clean_at, CLEAN), view + NOISY_1))
    plan = StreamPlan(
        tokens=_tokens(rows, blocks, order, stream, block_size),
        clean=len(clean_at) * block_size,
        block_size=block_size,
        predicate=block_diffusion,
        last_layer=last_layer,
    )
    slots, targets = _shifted_targets(rows, mask, blocks, noisy, plan.clean, block_size)
    positions = rows.position_ids.unflatten(1, (-1, block_size)).flatten(0, 1)
    return _batch(
        token_ids[stream, order].flatten(), positions[order].flatten(), plan, slots, targets, rows, batch_hash
    )


def lay_out_causal(rows: RowBatch, *, block_size: int, last_layer: int, batch_hash: str = "") -> TrainingBatch:
    """The next-token sequence of `rows` (the AR control): every document up to its last supervised token's block."""
    blocks = _blocks(rows, block_size)
    keep = _until_last(blocks.supervised | blocks.head, blocks) | _dummy(blocks, blocks.supervised | blocks.head)
    order = keep.flatten().nonzero()[:, 0]
    plan = StreamPlan(
        tokens=_tokens(rows, blocks, order, torch.full_like(order, CLEAN), block_size),
        clean=len(order) * block_size,
        block_size=block_size,
        predicate=causal,
        last_layer=last_layer,
    )
    where = torch.full((keep.numel(),), -1).scatter(0, order, torch.arange(len(order)))
    row, position = _predicted(rows, blocks, block_size)
    source = row * rows.input_ids.shape[1] + position - 1
    slots = where[source // block_size] * block_size + source % block_size
    ids = rows.input_ids.unflatten(1, (-1, block_size)).flatten(0, 1)[order].flatten()
    positions = rows.position_ids.unflatten(1, (-1, block_size)).flatten(0, 1)[order].flatten()
    return _batch(ids, positions, plan, slots, rows.labels[row, position], rows, batch_hash)


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
    noisy = noisy | _dummy(blocks, noisy)
    return noisy, _until_last(noisy, blocks) & ~_last_of(noisy, blocks)


def _shift_left(flags: Tensor) -> Tensor:
    return torch.cat((flags[:, 1:], torch.zeros_like(flags[:, :1])), 1)


def _dummy(blocks: _Blocks, kept: Tensor) -> Tensor:
    """Something to run on when nothing is supervised: the first block."""
    first = torch.zeros_like(blocks.supervised)
    first[0, 0] = not bool(kept.any())
    return first


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
    """Facts of each laid-out token. Document ids are made unique across rows; every tail block is its own."""
    count = blocks.document.shape[1]
    row, block = order // count, order % count
    document = blocks.document.flatten()[order]
    stride = int(blocks.document.max()) + 2
    unique = torch.where(document == TAIL, -2 - order, row * stride + document)
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
    rows: RowBatch, mask: Tensor, blocks: _Blocks, noisy: Tensor, offset: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Slots [N] of the laid-out sequence whose logits predict targets [N]: one to the left, in the masking view."""
    row, position = _predicted(rows, blocks, block_size)
    rank = noisy.flatten().cumsum(0) - 1
    source = row * rows.input_ids.shape[1] + position - 1
    view = torch.where(mask[row, position], 0, 1)
    slots = offset + (rank[source // block_size] * VIEWS + view) * block_size + source % block_size
    return slots, rows.labels[row, position]


def _batch(
    ids: Tensor, positions: Tensor, plan: StreamPlan, slots: Tensor, targets: Tensor, rows: RowBatch, batch_hash: str
) -> TrainingBatch:
    weights = torch.ones(len(slots))
    if not len(slots):
        slots, targets, weights = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.zeros(1)
    return TrainingBatch(
        input_ids=ids[None],
        position_ids=positions[None],
        plan=plan,
        slots=slots,
        targets=targets,
        weights=weights,
        supervised_tokens=rows.supervised_tokens,
        batch_hash=batch_hash,
    )
