"""A document longer than a row: split at turns, cut at its end, or rejected.

Splitting keeps exchanges (a question and its answers) whole and puts as many into a piece as fit. An exchange that is
itself longer than a row is cut every `limit` tokens. Pieces repeat nothing; each is a document of its own, and one
without a supervised token left teaches nothing and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipelines.chats.records import Rejected
from pipelines.chats.template import Encoded


@dataclass
class Fitted:
    """Pieces that fit in a row, and what that took."""

    pieces: list[Encoded] = field(default_factory=list)
    split: int = 0
    truncated: int = 0
    dropped: int = 0


def fit(documents: list[Encoded], limit: int, policy: str) -> Fitted:
    """The pieces of one chat's encoded documents. limit: tokens in a row. policy: split, truncate or reject.

    A position that begins a piece is never predicted, so it is not supervised. Raises Rejected under the policy
    `reject`, and where no piece has a supervised token.
    """
    result = Fitted()
    for document in documents:
        pieces = _pieces(document, limit, policy, result)
        kept = [piece for piece in map(_headless, pieces) if piece.supervised.any()]
        result.pieces += kept
        result.dropped += len(pieces) - len(kept)
    if not result.pieces:
        raise Rejected("no supervised tokens", "no part of the chat that fits a row holds any")
    return result


def _pieces(document: Encoded, limit: int, policy: str, result: Fitted) -> list[Encoded]:
    if len(document) <= limit:
        return [document]
    if policy == "reject":
        raise Rejected("over-long", f"{len(document)} tokens, a row holds {limit}")
    if policy == "truncate":
        result.truncated += 1
        return [_slice(document, 0, limit)]
    result.split += 1
    return [_slice(document, start, end) for start, end in _ranges(document, limit)]


def _ranges(document: Encoded, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive [start, end) of at most `limit` tokens that cover the document, cut at exchanges where possible."""
    start = 0
    edges = [*document.cuts, len(document)]
    for edge, following in zip(edges, [*edges[1:], None], strict=True):
        while edge - start > limit:
            yield start, start + limit
            start += limit
        if following is None or following - start > limit:
            yield start, edge
            start = edge


def _slice(document: Encoded, start: int, end: int) -> Encoded:
    return Encoded(document.input_ids[start:end], document.supervised[start:end])


def _headless(piece: Encoded) -> Encoded:
    """The piece with its first position unsupervised."""
    if not len(piece) or not piece.supervised[0]:
        return piece
    supervised = piece.supervised.copy()
    supervised[0] = False
    return Encoded(piece.input_ids, supervised, piece.cuts)
