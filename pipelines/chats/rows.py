"""Documents laid into packed rows: the columns of DESIGN's "Packed rows", as an Arrow table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from actors.training.rows import RowFormat

IGNORED = -100  # label of a position without loss
TAIL = -1  # document id of positions that belong to no document


@dataclass(frozen=True)
class Placed:
    """A document and its place: index is its document id, row counts from the table's first row, start in tokens."""

    index: int
    row: int
    start: int
    input_ids: np.ndarray
    labels: np.ndarray


def build_rows(documents: Iterable[Placed], count: int, form: RowFormat) -> pa.Table:
    """`count` rows. Padding is the mask token with label -100; inside a document's last block it has the document's id
    and goes on counting positions; the tail of a row has document id -1 and position 0."""
    shape = (count, form.context_length)
    input_ids = np.full(shape, form.mask_token_id, np.int32)
    labels = np.full(shape, IGNORED, np.int32)
    document_ids = np.full(shape, TAIL, np.int32)
    position_ids = np.zeros(shape, np.int32)
    for document in documents:
        length = len(document.input_ids)
        padded = form.padded(length)
        real = slice(document.start, document.start + length)
        whole = slice(document.start, document.start + padded)
        input_ids[document.row, real] = document.input_ids
        labels[document.row, real] = document.labels
        document_ids[document.row, whole] = document.index
        position_ids[document.row, whole] = np.arange(padded)
    columns = [_lists(column) for column in (input_ids, labels, document_ids, position_ids)]
    return pa.Table.from_arrays(columns, schema=form.schema)


def _lists(values: np.ndarray) -> pa.ListArray:
    """An array [R, L] as R lists."""
    offsets = np.arange(values.shape[0] + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))
