"""From packed rows to one training step: what the context tower reads, and the noisy blocks of the denoiser.

    context   rows of clean tokens, as packed; a document a row where layers are recurrent
    blocks    N blocks of S tokens; each reads the context of its document before its first position

Blocks start where a response starts (a run of supervised tokens: every turn starts new ones), and need no alignment. A
response's last block is filled to S with [MASK], unscored, in the denoiser only, as a canvas stands there in decoding.
A block in which nothing is masked teaches nothing and is left out, and so is context that no block reads. t is drawn
per document. With complementary masks every block stands there twice, its second view masked where the first is not,
at the time 1 - t. Letters: B rows, L row length, D documents, N blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.corruption import IGNORED, row_generator
from model.layout import RowBatch, hash_batch
from model.masks import NOISY_1, NOISY_2, TAIL

EPSILON = 1e-3  # smallest time
UNREAD = 0  # stands where no block reads the context: there may be a mask, which the context tower need not know


class Corruption(NamedTuple):
    """t: float32 [B, L], the time of each token's document; mask: bool [B, L], drawn with probability t."""

    t: Tensor
    mask: Tensor


@dataclass(frozen=True)
class TwoTowerBatch:
    """One step's tensors.

    context_ids, context_positions, context_documents: int64 [R, n]; documents have ids of their own over all rows, TAIL
    is padding. noisy_ids, positions, targets: int64 [N, S]; masked: bool [N, S], where the loss is.
    block_row, block_offset, block_start, block_document: int64 [N]: where a block begins in the context rows, and at
    which position of which document; source_row: the packed row that it was cut from. stream: int64 [N], NOISY_1, or
    NOISY_2 for a block's second view. times: float [D]; time_index:
    int64 [N].
    scored: bool [N, S], the queries whose logits are of the masked ones: the same, or with a token shift the slots
    before them. Flattened, both have one order.
    weight: 1, or 0 for a batch that holds a block only so that every rank runs the same modules.
    """

    context_ids: Tensor
    context_positions: Tensor
    context_documents: Tensor
    noisy_ids: Tensor
    positions: Tensor
    targets: Tensor
    masked: Tensor
    scored: Tensor
    block_row: Tensor
    block_offset: Tensor
    block_start: Tensor
    block_document: Tensor
    source_row: Tensor
    stream: Tensor
    times: Tensor
    time_index: Tensor
    weight: float
    supervised_tokens: int
    batch_hash: str

    @property
    def scored_tokens(self) -> int:
        """Masked positions: what the loss is a mean over (in the global batch)."""
        return int(self.masked.sum()) if self.weight else 0

    @property
    def tokens(self) -> int:
        """Tokens that the towers run on, both together."""
        return int(self.context_ids.numel() + self.noisy_ids.numel())

    @property
    def noise(self) -> Tensor:
        """The time of each prediction, [M], in the order of `tensor[masked]`."""
        return self._of_predictions(self.times[self.time_index])

    @property
    def weights(self) -> Tensor:
        """What each prediction counts in the loss, float [M]: 1, or 0 in a batch without anything to learn."""
        return torch.full_like(self.noise, self.weight)

    @property
    def bound_weights(self) -> Tensor:
        """What each prediction counts in the bound of the likelihood, float [M]: 1/t."""
        return self.weights / self.noise

    @property
    def rows(self) -> Tensor:
        """The packed row of each prediction, int64 [M]."""
        return self._of_predictions(self.source_row)

    def _of_predictions(self, of_blocks: Tensor) -> Tensor:
        return of_blocks[:, None].expand_as(self.masked)[self.masked]

    def to(self, device: torch.device | str) -> TwoTowerBatch:
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


class _Span(NamedTuple):
    """A run of tokens that blocks are cut from: [begin, end) of a row, all of one document."""

    row: int
    begin: int
    end: int


def draw_corruption(rows: RowBatch, seed: int, sample_ids: Sequence[int], epochs: Sequence[int]) -> Corruption:
    """t = eps + (1 - eps) u per document and a mask drawn with probability t; keyed by (seed, sample id, epoch)."""
    length, places = rows.input_ids.shape[1], _places(rows.document_ids)
    times, masks = [], []
    for row, (sample, epoch) in enumerate(zip(sample_ids, epochs, strict=True)):
        generator = row_generator(seed, sample, epoch)
        drawn = EPSILON + (1 - EPSILON) * torch.rand(length, generator=generator)  # as many as there may be documents
        t = drawn[places[row]]
        times.append(t)
        masks.append(torch.rand(length, generator=generator) < t)
    return Corruption(torch.stack(times), torch.stack(masks))


def _places(documents: Tensor) -> Tensor:
    """Which of its row's documents each token is of, int64 [B, L]: packed rows number theirs over the whole data."""
    begins = torch.zeros_like(documents)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins.cumsum(1)


def response_spans(rows: RowBatch) -> list[_Span]:
    """Every run of supervised tokens of one document."""
    supervised = rows.labels != IGNORED
    spans = []
    for row in range(rows.input_ids.shape[0]):
        begins = supervised[row].clone()
        same = rows.document_ids[row, 1:] == rows.document_ids[row, :-1]
        begins[1:] &= ~(supervised[row, :-1] & same)
        ends = supervised[row].clone()
        ends[:-1] &= ~(supervised[row, 1:] & same)
        found = zip(begins.nonzero()[:, 0].tolist(), ends.nonzero()[:, 0].tolist(), strict=True)
        spans += [_Span(row, begin, end + 1) for begin, end in found]
    return spans


def whole_spans(rows: RowBatch) -> list[_Span]:
    """Whole documents, prompts included: blocks then lie on multiples of S, and hold unmasked prompt tokens."""
    everything = replace(rows, labels=torch.where(rows.document_ids == TAIL, IGNORED, rows.input_ids))
    return response_spans(everything)


def complement(corruption: Corruption) -> Corruption:
    """The second view: masked where the first is not, at the time 1 - t."""
    return Corruption((1 - corruption.t).clamp(min=EPSILON), ~corruption.mask)


def tower_lengths(rows: RowBatch, block_size: int, *, views: int = 1) -> Tensor:
    """Tokens that the towers run on for each row, at most: int64 [B]. Context up to the last block, and all blocks."""
    row, begin, _ = _cut(response_spans(rows), block_size)
    none = torch.zeros(len(rows.input_ids), dtype=torch.long)
    context = none.scatter_reduce(0, row, begin, "amax")
    return context + views * none.scatter_add(0, row, torch.full_like(row, block_size))


def lay_out_two_tower(
    rows: RowBatch,
    corruption: Corruption,
    *,
    block_size: int,
    mask_token_id: int,
    document_rows: bool,
    token_shift: bool = False,
    complementary: bool = False,
    spans: list[_Span] | None = None,
    keep_all: bool = False,
    sample_ids: Sequence[int] = (),
) -> TwoTowerBatch:
    """The batch of packed rows under a corruption. document_rows: one document a context row (recurrent layers).

    token_shift: see `TwoTowerConfig`; a block's first token is never masked then, nor scored. complementary: two views.
    spans: what blocks are cut from, by default the responses. keep_all: also blocks without a masked token.
    """
    spans = response_spans(rows) if spans is None else spans
    rows = replace(rows, document_ids=_places(rows.document_ids).masked_fill(rows.document_ids == TAIL, TAIL))
    row, begin, end = _cut(spans, block_size)
    stream = torch.full_like(row, NOISY_1)
    if complementary:
        row, begin, end = (x.repeat(2) for x in (row, begin, end))
        stream = torch.cat((stream, torch.full_like(stream, NOISY_2)))
    first = stream == NOISY_1
    slots = begin[:, None] + torch.arange(block_size)
    inside = slots < end[:, None]
    at = (row[:, None], slots.clamp(max=rows.input_ids.shape[1] - 1))
    other = complement(corruption)
    masked = torch.where(first[:, None], corruption.mask[at], other.mask[at]) & (rows.labels[at] != IGNORED) & inside
    if token_shift:
        masked[:, 0] = False
    kept = torch.ones_like(row, dtype=torch.bool) if keep_all else masked.any(1)
    if not kept.any():
        return _idle(rows, block_size, mask_token_id, document_rows, sample_ids)
    row, begin, inside, masked, stream, first = (x[kept] for x in (row, begin, inside, masked, stream, first))
    at = (at[0][kept], at[1][kept])
    clean = rows.input_ids[at]
    noisy = torch.where(masked | ~inside, mask_token_id, clean)
    context = _context(rows, row, begin, document_rows)
    start = rows.position_ids[row, begin]
    t = torch.where(first, corruption.t[row, begin], other.t[row, begin])
    times, time_index = torch.unique(t, return_inverse=True)
    return TwoTowerBatch(
        context_ids=context.ids,
        context_positions=context.positions,
        context_documents=context.documents,
        noisy_ids=noisy,
        positions=start[:, None] + torch.arange(block_size),
        targets=clean,
        masked=masked,
        scored=masked.roll(-1, 1) if token_shift else masked,
        block_row=context.block_row,
        block_offset=context.block_offset,
        block_start=start,
        block_document=context.block_document,
        source_row=row,
        stream=stream,
        times=times,
        time_index=time_index,
        weight=1.0,
        supervised_tokens=rows.supervised_tokens,
        batch_hash=_hash(rows, corruption, mask_token_id, sample_ids),
    )


def _cut(spans: list[_Span], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(row, begin, end) int64 [N] of all blocks; the last of a span may end early."""
    blocks = [
        (span.row, begin, min(begin + block_size, span.end))
        for span in spans
        for begin in range(span.begin, span.end, block_size)
    ]
    row, begin, end = torch.tensor(blocks, dtype=torch.long).reshape(-1, 3).unbind(1)
    return row, begin, end


class _Context(NamedTuple):
    ids: Tensor
    positions: Tensor
    documents: Tensor
    block_row: Tensor
    block_offset: Tensor
    block_document: Tensor


def _context(rows: RowBatch, row: Tensor, begin: Tensor, document_rows: bool) -> _Context:
    """Context rows up to the last block start that reads them, and where each block starts in them."""
    stride = int(rows.document_ids.max()) + 1
    unique = torch.where(
        rows.document_ids == TAIL, TAIL, torch.arange(len(rows.input_ids))[:, None] * stride + rows.document_ids
    )
    document = unique[row, begin]
    if not document_rows:
        used = max(int(begin.max()), 1)
        last = torch.zeros(len(rows.input_ids) * stride, dtype=torch.long).scatter_reduce(0, document, begin, "amax")
        here = unique[:, :used]
        unread = (here == TAIL) | (torch.arange(used) >= last[here.clamp(min=0)])
        ids, documents = rows.input_ids[:, :used].masked_fill(unread, UNREAD), here.masked_fill(unread, TAIL)
        return _Context(ids, rows.position_ids[:, :used], documents, row, begin, document)
    return _document_rows(rows, unique, row, begin, document)


def _document_rows(rows: RowBatch, unique: Tensor, row: Tensor, begin: Tensor, document: Tensor) -> _Context:
    found, block_row = torch.unique(document, return_inverse=True)
    firsts = [int((unique.flatten() == d).nonzero()[0]) for d in found]
    first = torch.tensor(firsts) % rows.input_ids.shape[1]
    source = torch.tensor(firsts) // rows.input_ids.shape[1]
    offset = begin - first[block_row]
    lengths = torch.zeros(len(found), dtype=torch.long).scatter_reduce(0, block_row, offset, "amax")
    places = torch.arange(max(int(lengths.max()), 1))
    at = (source[:, None], (first[:, None] + places).clamp(max=rows.input_ids.shape[1] - 1))
    unread = places >= lengths[:, None]
    documents = found[:, None].expand_as(unread).masked_fill(unread, TAIL)
    ids, positions = rows.input_ids[at].masked_fill(unread, UNREAD), places.expand(len(found), -1)
    return _Context(ids, positions, documents, block_row, offset, document)


def _idle(
    rows: RowBatch, block_size: int, mask_token_id: int, document_rows: bool, sample_ids: Sequence[int]
) -> TwoTowerBatch:
    """A batch without anything to learn: one block of masks over one clean token, of weight 0."""
    one = torch.zeros((1, 1), dtype=torch.long)
    block = torch.full((1, block_size), mask_token_id)
    masked = torch.zeros_like(block, dtype=torch.bool)
    masked[0, 0] = True
    zero = torch.zeros(1, dtype=torch.long)
    return TwoTowerBatch(
        context_ids=torch.full_like(one, UNREAD),
        context_positions=one,
        context_documents=one,
        noisy_ids=block,
        positions=1 + torch.arange(block_size)[None],
        targets=torch.zeros_like(block),
        masked=masked,
        scored=masked,
        block_row=zero,
        block_offset=zero + 1,
        block_start=zero + 1,
        block_document=zero,
        source_row=zero,
        stream=zero + NOISY_1,
        times=torch.ones(1),
        time_index=zero,
        weight=0.0,
        supervised_tokens=rows.supervised_tokens,
        batch_hash=hash_batch(sample_ids, rows.input_ids[: len(sample_ids)]),
    )


def _hash(rows: RowBatch, corruption: Corruption, mask_token_id: int, sample_ids: Sequence[int]) -> str:
    noisy = rows.input_ids.masked_fill(corruption.mask & (rows.labels != IGNORED), mask_token_id)
    return hash_batch(sample_ids, noisy)
