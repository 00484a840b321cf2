"""Packed rows on disk for tests, written as prepare writes them, from random documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from actors.rows import COLUMNS, RowFormat
from model.layout import RowBatch
from tests.model.rows import random_rows


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


def random_row_folder(folder: Path, *, rows: int, blocks: int = 6, mask_token_id: int, seed: int = 0) -> Path:
    """`rows` random rows with blocks of 8 tokens, padded with mask_token_id."""
    batch = random_rows(seed, rows=rows, blocks=blocks)
    batch.input_ids[(batch.labels == -100) & (batch.input_ids == 3)] = mask_token_id
    return write_rows(folder, batch, RowFormat(8, blocks * 8, mask_token_id))
