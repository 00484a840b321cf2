"""Which document lies in which row, and where: a plan made from lengths alone, so it depends on nothing else.

Documents take whole blocks (METHOD section 1: no block holds two documents) and are never split here. Best fit,
longest first: each goes into the fullest row it still fits. Free space is counted in blocks, of which a row has few, so
the rows with a given space lie in one bucket each and a set of bits says which buckets are not empty: the plan takes
O(documents), with no search.

Very many documents are planned in windows of consecutive ones (at most `WINDOW` documents and about `WINDOW_TOKENS`
tokens), so that the rows of a window read only their own part of the documents. The rows of a window are put in an
order drawn from the seed (longest first would otherwise show), the documents of a row stand in input order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOW = 32_768
WINDOW_TOKENS = 1 << 24


@dataclass(frozen=True)
class Plan:
    """Where each document lies. rows int64 [N]: its row; starts int64 [N]: its first position there, in tokens.
    windows int64 [W + 1, 2]: the first document and the first row of each window, and behind the last one."""

    rows: np.ndarray
    starts: np.ndarray
    row_count: int
    windows: np.ndarray

    def documents_of(self, first: int, last: int) -> np.ndarray:
        """The documents in rows [first, last), in order; only their windows are searched."""
        documents, rows = self.windows[:, 0], self.windows[:, 1]
        begin = documents[np.searchsorted(rows, first, side="right") - 1]
        end = documents[np.searchsorted(rows, last, side="left")]
        inside = self.rows[begin:end]
        return begin + np.flatnonzero((inside >= first) & (inside < last))


def plan_rows(lengths: np.ndarray, *, block_size: int, context_length: int, seed: int, window: int = WINDOW) -> Plan:
    """Plan documents of the given lengths (int [N], tokens, each 1 .. context_length).

    Deterministic in its arguments. Raises ValueError for a document that fits no row.
    """
    blocks = -(-lengths.astype(np.int64) // block_size)
    capacity = context_length // block_size
    if len(blocks) and not 1 <= blocks.min() <= blocks.max() <= capacity:
        raise ValueError(f"lengths must be from 1 to {context_length}, not {lengths.min()} to {lengths.max()}")
    rows, starts = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.int64)
    windows = [(0, 0)]
    for number, part in enumerate(_windows(blocks, window, max(capacity, WINDOW_TOKENS // block_size))):
        inside = _best_fit(blocks[part], capacity)
        count, row_count = int(inside.max()) + 1, windows[-1][1]
        order = np.random.Generator(np.random.PCG64([seed, number])).permutation(count)
        rows[part] = order[inside] + row_count
        starts[part] = _starts(rows[part], blocks[part]) * block_size
        windows.append((part.stop, row_count + count))
    return Plan(rows, starts, windows[-1][1], np.array(windows))


def _windows(blocks: np.ndarray, most_documents: int, most_blocks: int) -> Iterator[slice]:
    """Stretches of consecutive documents, as long as both limits allow."""
    before = np.r_[0, np.cumsum(blocks)]
    first = 0
    while first < len(blocks):
        fitting = int(np.searchsorted(before, before[first] + most_blocks, side="right")) - 1
        last = min(first + most_documents, max(fitting, first + 1), len(blocks))
        yield slice(first, last)
        first = last


def _best_fit(blocks: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each document, rows numbered as they are opened."""
    rows = np.zeros(len(blocks), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free blocks
    spaces = 0  # bit f is set where open_rows[f] is not empty
    count = 0
    for document in np.argsort(-blocks, kind="stable").tolist():
        need = int(blocks[document])
        fitting = spaces >> need
        if fitting:
            space = need + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces &= ~(1 << space)
        else:
            space, row, count = capacity, count, count + 1
        rows[document] = row
        if space > need:
            open_rows[space - need].append(row)
            spaces |= 1 << (space - need)
    return rows


def _starts(rows: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """First block of each document, when the documents of a row stand one behind the other in input order."""
    order = np.argsort(rows, kind="stable")
    before = np.cumsum(blocks[order]) - blocks[order]
    first = np.r_[True, np.diff(rows[order]) > 0] if len(rows) else np.zeros(0, bool)
    base = np.maximum.accumulate(np.where(first, before, 0))
    starts = np.empty(len(rows), np.int64)
    starts[order] = before - base
    return starts


def parts(plan: Plan, rows_per_part: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges [first, last) that become one file each."""
    for first in range(0, plan.row_count, rows_per_part):
        yield first, min(first + rows_per_part, plan.row_count)
