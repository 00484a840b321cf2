"""Packed rows on disk for tests, written as prepare writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.training.rows import COLUMNS, RowFormat
from model.corruption import IGNORED
from model.layout import RowBatch
from model.masks import TAIL


def write_rows(
    folder: Path, rows: RowBatch, form: RowFormat, *, parts: Sequence[int] | None = None, row_group: int = 3
) -> Path:
    """Write rows [B, L] as part files of the given numbers of rows (default: one file)."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, count in enumerate(parts or [rows.input_ids.shape[0]]):
        columns = [pa.array(list(getattr(rows, name)[first : first + count].int().numpy())) for name in COLUMNS]
        table = pa.Table.from_arrays(columns, schema=form.schema)
        pq.write_table(table, folder / f"part-{number:05d}.parquet", row_group_size=row_group)
        first += count
    return folder


def counting_rows(count: int, *, blocks: int = 6, block_size: int = 8, mask_token_id: int) -> RowBatch:
    """Rows a tiny model can learn: documents that count upwards from different starts, the first four tokens a prompt.

    Documents fill one to three blocks less a few tokens; some rows end in a tail.
    """
    length = blocks * block_size
    ids = torch.full((count, length), mask_token_id)
    labels, documents = torch.full((count, length), IGNORED), torch.full((count, length), TAIL)
    positions = torch.zeros((count, length), dtype=torch.long)
    for row in range(count):
        start, document = 0, 0
        for size in (13, 6, 20)[row % 3 :] if row % 4 else (13, 6, 15):
            padded = -(-size // block_size) * block_size
            place, whole = slice(start, start + size), slice(start, start + padded)
            ids[row, place] = 20 + (row * 7 + document * 11 + torch.arange(size)) % 60
            labels[row, start + 4 : start + size] = ids[row, start + 4 : start + size]
            documents[row, whole] = document
            positions[row, whole] = torch.arange(padded)
            start, document = start + padded, document + 1
    return RowBatch(ids, labels, documents, positions)
