"""rejected.jsonl: what could not be used, and when there is too much of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from model.errors import UserError
from pipelines.chats.documents import Summary, rejected_name
from pipelines.chats.stages import ReadTask
from pipelines.chats.statistics import in_words, rejected_by_reason
from pipelines.jobkit import OutputFolder

REJECTED = "rejected.jsonl"


def write_rejected(output: OutputFolder, folder: str, tasks: Sequence[ReadTask], summaries: Sequence[Summary]) -> None:
    """Join the shards' rejected lines (in a folder of the output), numbered within their file."""
    with output.stage(REJECTED) as path, path.open("w", encoding="utf-8") as joined:
        for task, offset in zip(tasks, _line_offsets(tasks, summaries), strict=True):
            uri = task.shard.file.uri
            for line, reason in _rejected_of(output, f"{folder}/{rejected_name(task.shard)}"):
                joined.write(json.dumps({"file": uri, "line": line + offset, "reason": reason}) + "\n")


def _line_offsets(tasks: Sequence[ReadTask], summaries: Sequence[Summary]) -> Iterator[int]:
    """Lines of the same file before each shard."""
    before: Counter[int] = Counter()
    for task, summary in zip(tasks, summaries, strict=True):
        yield before[task.shard.file_index]
        before[task.shard.file_index] += summary.lines


def _rejected_of(output: OutputFolder, name: str) -> Iterator[tuple[int, str]]:
    with output.filesystem.open(output.place(name), "rb") as file:
        for line in file:
            number, reason = json.loads(line)
            yield number, reason


def check_rejected(summaries: Sequence[Summary], most: int | None, tasks: Sequence[ReadTask], listed: str) -> None:
    """Raises UserError when more lines were rejected than `most` allows, or nothing is left. listed: rejected.jsonl."""
    rejected = rejected_by_reason(summaries)
    total = sum(rejected.values())
    if most is not None and total > most:
        raise UserError(
            f"{total} lines were rejected ({in_words(rejected)}), more than --read.max_rejected {most}: see {listed}."
        )
    if any(summary.train.documents for summary in summaries):
        return
    if any(summary.held_out.documents for summary in summaries):
        raise UserError("Every document was held out: lower --held_out, or give more data.")
    files = sorted({task.shard.file.uri for task in tasks})
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    why = f"all lines were rejected ({in_words(rejected)}), see {listed}" if total else "there are no lines"
    raise UserError(f"No valid chat is left in {where}: {why}.")
