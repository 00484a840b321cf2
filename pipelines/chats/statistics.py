"""What was read and what became of it: the figures of stats.json, for the whole and for each file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pipelines.chats.documents import Counts, Summary
from pipelines.chats.pack import Plan
from pipelines.chats.rows import RowFormat
from pipelines.chats.stages import Lengths, ReadTask


def rejected_by_reason(summaries: Sequence[Summary]) -> dict[str, int]:
    """Lines by the kind of their rejection."""
    counts: Counter[str] = Counter()
    for summary in summaries:
        counts.update(summary.rejected)
    return dict(sorted(counts.items()))


def in_words(rejected: Mapping[str, int]) -> str:
    """`3 empty chat, 1 malformed JSON`."""
    return ", ".join(f"{count} {kind}" for kind, count in rejected.items())


def share(part: int, whole: int) -> float:
    """Rounded to four places; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def split_figures(lengths: Lengths, members: np.ndarray, plan: Plan, form: RowFormat) -> dict[str, Any]:
    """The rows of one split. fill: of all row positions those in a document's blocks, their padding included;
    token_fill: those that hold a real token."""
    length = lengths.length[members].astype(np.int64)
    tokens, supervised = int(length.sum()), int(lengths.supervised[members].sum(dtype=np.int64))
    padded = int((-(-length // form.block_size)).sum()) * form.block_size
    positions = plan.row_count * form.context_length
    return {
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": share(supervised, tokens),
        "rows": plan.row_count,
        "fill": share(padded, positions),
        "token_fill": share(tokens, positions),
    }


def statistics(
    tasks: Sequence[ReadTask],
    summaries: Sequence[Summary],
    lengths: Lengths,
    splits: Mapping[str, dict[str, Any]],
    form: RowFormat,
) -> dict[str, Any]:
    """stats.json: the training documents' figures, the held-out ones' under held_out, what was read and rejected."""
    train, held_out = Counts(), Counts()
    for summary in summaries:
        train.add(summary.train)
        held_out.add(summary.held_out)
    rejected = rejected_by_reason(summaries)
    return {
        **asdict(train),
        **splits["train"],
        "held_out": {**asdict(held_out), **splits["held_out"]},
        "rejected": sum(rejected.values()),
        "rejected_by_reason": rejected,
        "files": _file_figures(tasks, summaries, lengths),
        **asdict(form),
    }


def shards_by_file(tasks: Sequence[ReadTask]) -> dict[str, list[int]]:
    """The tasks of each file, in order."""
    shards: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        shards.setdefault(task.shard.file.uri, []).append(number)
    return shards


def documents_by_file(tasks: Sequence[ReadTask], bounds: np.ndarray) -> dict[str, slice]:
    """Where each file's documents are among all of them: the shards of a file stand one behind the other."""
    return {
        uri: slice(int(bounds[shards[0]]), int(bounds[shards[-1] + 1])) for uri, shards in shards_by_file(tasks).items()
    }


def _file_figures(tasks: Sequence[ReadTask], summaries: Sequence[Summary], lengths: Lengths) -> dict[str, Any]:
    where = documents_by_file(tasks, lengths.bounds)
    return {
        uri: _figures_of_file([summaries[shard] for shard in shards], lengths, where[uri])
        for uri, shards in shards_by_file(tasks).items()
    }


def _figures_of_file(summaries: Sequence[Summary], lengths: Lengths, where: slice) -> dict[str, Any]:
    counts = Counts()
    for summary in summaries:
        counts.add(summary.train)
        counts.add(summary.held_out)
    rejected = rejected_by_reason(summaries)
    length = lengths.length[where]
    tokens = int(length.sum(dtype=np.int64))
    supervised = int(lengths.supervised[where].sum(dtype=np.int64))
    return {
        "format": summaries[0].format,
        "lines": sum(summary.lines for summary in summaries),
        "documents": counts.documents,
        "turns": counts.turns,
        "pieces": counts.pieces,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": share(supervised, tokens),
        "length": _quantiles(length),
        "rejected": sum(rejected.values()),
        "rejected_by_reason": rejected,
    }


def _quantiles(length: np.ndarray) -> dict[str, int]:
    """Tokens of a document (of a piece, where it was cut)."""
    if not len(length):
        return {"median": 0, "p95": 0, "longest": 0}
    median, p95, longest = np.quantile(length, (0.5, 0.95, 1.0), method="higher")
    return {"median": int(median), "p95": int(p95), "longest": int(longest)}
