"""stats.json, lengths.png and report.html of a prepared output, and what the job says at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipelines.chats.documents import documents_name
from pipelines.chats.histogram import draw_lengths
from pipelines.chats.page import FILES, Example, choose_examples, page, read_examples
from pipelines.chats.rejects import REJECTED
from pipelines.chats.stages import Lengths, ReadTask
from pipelines.chats.statistics import documents_by_file, in_words
from pipelines.jobkit import OutputFolder

REPORTS = ("stats.json", "lengths.png", "report.html")


def write_reports(
    output: OutputFolder,
    stats: Mapping[str, Any],
    tasks: Sequence[ReadTask],
    lengths: Lengths,
    documents: str,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write the three files. documents: the folder (path or URI) of the tokenized documents, for the examples."""
    with output.stage("stats.json") as path:
        path.write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
    by_file = {uri: lengths.length[where] for uri, where in documents_by_file(tasks, lengths.bounds).items()}
    with output.stage("lengths.png") as path:
        draw_lengths(by_file, stats["context_length"], path)
        picture = path.read_bytes()
    examples = _examples(tasks, lengths, documents, tokenizer)
    with output.stage("report.html") as path:
        path.write_text(page(stats, examples, picture), encoding="utf-8")


def _examples(
    tasks: Sequence[ReadTask], lengths: Lengths, documents: str, tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """Examples of the first files, the same however the files were cut into shards."""
    examples: list[Example] = []
    for uri, where in list(documents_by_file(tasks, lengths.bounds).items())[:FILES]:
        chosen = where.start + np.array(choose_examples(lengths.length[where]), np.int64)
        shards = np.searchsorted(lengths.bounds, chosen, side="right") - 1
        for shard in np.unique(shards):
            place = f"{documents}/{documents_name(tasks[shard].shard)}"
            examples += read_examples(tokenizer, uri, place, chosen[shards == shard] - lengths.bounds[shard])
    return examples


def told(stats: Mapping[str, Any], output: OutputFolder) -> str:
    """The end of the job, in sentences."""
    lines = [
        f"{stats['documents']:,} documents with {stats['turns']:,} turns: {stats['tokens']:,} tokens, "
        f"{stats['supervised_share']:.0%} of them supervised.",
        f"{stats['rows']:,} rows of {stats['context_length']:,} tokens, {stats['fill']:.1%} full with whole blocks, "
        f"{stats['token_fill']:.1%} with tokens, in {output.uri()}.",
    ]
    for portion in stats.get("mixture", ()):
        lines.append(f"Mixture: {portion['share']:.1%} from {portion['source']}, {portion['passes']:g} passes.")
    if stats["held_out"]["documents"]:
        held = stats["held_out"]
        lines.append(f"Held out: {held['documents']:,} documents in {held['rows']:,} rows.")
    return "\n".join([*lines, *_losses(stats, output)])


def _losses(stats: Mapping[str, Any], output: OutputFolder) -> list[str]:
    """What was left out or changed."""
    lines = []
    if stats["split"] or stats["truncated"] or stats["dropped"]:
        lines.append(
            f"Longer than a row: {stats['split']:,} documents split, {stats['truncated']:,} cut, "
            f"{stats['dropped']:,} pieces without supervised tokens dropped."
        )
    if stats["unrolled"]:
        lines.append(
            f"{stats['unrolled']:,} chats became one document per answer: the template rewrites earlier turns."
        )
    if stats["unlearnt"]:
        lines.append(
            f"{stats['unlearnt']:,} answers are not supervised: the template prompts them otherwise than it shows them."
        )
    if stats["rejected"]:
        reasons = in_words(stats["rejected_by_reason"])
        lines.append(f"Rejected: {stats['rejected']:,} lines ({reasons}), see {output.uri(REJECTED)}.")
    return lines
