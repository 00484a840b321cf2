"""Small packed rows for tests: documents of random length, padded to whole blocks, with supervised stretches."""

from __future__ import annotations

import torch

from model.layout import RowBatch

MASK = 3


def random_rows(seed: int, *, rows: int = 2, blocks: int = 6, block_size: int = 8, vocabulary: int = 200) -> RowBatch:
    """Rows [B, blocks * K] with documents of one block and more, a tail in some rows, supervision in most documents."""
    g = torch.Generator().manual_seed(seed)
    length = blocks * block_size
    ids = torch.full((rows, length), MASK)
    labels, documents = torch.full((rows, length), -100), torch.full((rows, length), -1)
    positions = torch.arange(length).repeat(rows, 1)
    for b in range(rows):
        start, document = 0, 0
        while start < length:
            size = int(torch.randint(2, 3 * block_size, (1,), generator=g))
            padded = min(-(-size // block_size) * block_size, length - start)
            size = min(size, padded)
            if start and torch.rand((), generator=g) < 0.15:
                positions[b, start:] = torch.arange(length - start)
                break
            ids[b, start : start + size] = torch.randint(10, vocabulary, (size,), generator=g)
            documents[b, start : start + padded] = document
            positions[b, start : start + padded] = torch.arange(padded)
            if torch.rand((), generator=g) < 0.85:
                first, end = sorted(torch.randint(0, size + 1, (2,), generator=g).tolist())
                labels[b, start + first : start + end] = ids[b, start + first : start + end]
            start, document = start + padded, document + 1
    return RowBatch(ids, labels, documents, positions)
