"""Chats in, packed rows out.

    python pipelines/prepare.py --model MODEL --data chats.jsonl --output rows
    python pipelines/prepare.py --output rows                # the project's own tasks, for the demo's base model

Ray Data reads the files in shards, renders every chat with the tokenizer's own template and marks what the assistant
wrote; the driver plans from the documents' lengths which of them lie in which row (pipelines/chats/pack.py); Ray Data
writes the rows. The output folder:

    part-00000.parquet ...    packed rows: input_ids, labels, document_ids, position_ids
    held_out/part-...         the rows of held-out documents, when there are any
    tasks/*.jsonl             the generated chats, when --data is absent
    stats.json                documents, turns, tokens, supervised share, rows, fill, splits, rejects by reason
    rejected.jsonl            file, line and reason of every line that could not be used
    manifest.json             configuration, input hashes, versions, figures
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import Field

from model.errors import UserError
from pipelines.chats.documents import Counts, Reading, Summary, encoder_of, rejected_name
from pipelines.chats.nodes import check_seen, several_nodes, wait_for_cpus
from pipelines.chats.pack import parts, plan_rows
from pipelines.chats.rows import RowFormat
from pipelines.chats.sources import InputFile, cut, find_files
from pipelines.chats.stages import (
    Layout,
    Lengths,
    Part,
    ReadTask,
    documents_places,
    make_all_documents,
    read_lengths,
    write_all_parts,
)
from pipelines.chats.vocabulary import row_format
from pipelines.jobkit import (
    NOT_IDENTITY,
    ClusterConfig,
    JobConfig,
    OutputFolder,
    PackConfig,
    Progress,
    ReadConfig,
    Section,
    connect_ray,
    hash_inputs,
    main,
)
from pipelines.tasks import SPLITS, generate

DOCUMENTS = ".documents"  # tokenized documents, between the two stages
ROWS_PER_PART = 2048
FOLDERS = {"train": "", "held_out": "held_out/"}


class TasksConfig(Section):
    """The project's own tasks, used when --data is absent."""

    count: int = Field(2000, ge=1, description="generated tasks to train on")
    held_out: int = Field(200, ge=0, description="generated tasks that are kept out of training; none is in both")
    seed: int = Field(0, ge=0, description="seed that chooses the tasks and their order")


class PrepareConfig(JobConfig):
    """Turn chats into packed rows for adaptation: tokens, what the assistant wrote, and block-aligned rows."""

    held_out: float = Field(
        0.0, ge=0, lt=1, description="share of the documents of --data to keep out of training, chosen by their content"
    )
    workers: int | None = Field(
        None, ge=1, description="tasks that run at once; null: as many as CPUs", json_schema_extra=NOT_IDENTITY
    )
    read: ReadConfig = ReadConfig()
    pack: PackConfig = PackConfig()
    tasks: TasksConfig = TasksConfig()
    cluster: ClusterConfig = ClusterConfig()


@dataclass(frozen=True)
class Source:
    """A file of chats and the share of its documents to hold out (1.0: all of them)."""

    file: InputFile
    held_out: float


def run(config: PrepareConfig) -> dict[str, Any]:
    """Do the job and return its figures (the content of stats.json); a finished output is left as it is."""
    assert config.output is not None, "jobkit settles the output"
    files = find_files(config.data)
    with OutputFolder(
        config.output, job="prepare", config=config, inputs=hash_inputs(file.uri for file in files)
    ) as output:
        figures = _finished(output) or _prepare_or_forget(config, output, files)
        if output.finished is None:
            output.finish(figures, seeds={"tasks.seed": config.tasks.seed} if not files else {})
        _clear(output)
        return figures


def _finished(output: OutputFolder) -> dict[str, Any] | None:
    if output.finished is None:
        return None
    print(f"{output.uri()} is finished: nothing to do.")
    figures: dict[str, Any] = output.finished["figures"]
    return figures


def _prepare_or_forget(config: PrepareConfig, output: OutputFolder, files: Sequence[InputFile]) -> dict[str, Any]:
    """Bad input leaves nothing to continue, only rejected.jsonl to look into."""
    try:
        return _prepare(config, output, [Source(file, config.held_out) for file in files])
    except UserError:
        _clear(output)
        output.forget()
        raise


def plan(config: PrepareConfig) -> dict[str, Any]:
    """What --dry-run shows: what would be read and in how many pieces. Starts nothing."""
    files = find_files(config.data)
    return {
        "source": "files" if files else "generated tasks",
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "shards": len(cut(files, config.read.shard_bytes)) if files else 2,
        "rows_per_part": ROWS_PER_PART,
        "cpus_per_task": 1,
        "tasks_at_once": config.workers or "as many as CPUs",
    }


def _prepare(config: PrepareConfig, output: OutputFolder, sources: list[Source]) -> dict[str, Any]:
    form, notes = row_format(config.model, block_size=config.pack.block_size, context_length=config.pack.context_length)
    plain = encoder_of(config.model).plain
    if plain:
        notes.append("the tokenizer has no chat template: the plain one of model/chat_template.py is used.")
    for note in notes:
        print(f"prepare: {note}", file=sys.stderr, flush=True)
    connect_ray()
    wait_for_cpus(config.cluster.wait_s)
    tasks = _read_tasks(config, sources or _write_tasks(config.tasks, output))
    if several_nodes():
        inputs = sorted({("--data", task.shard.file.uri) for task in tasks})
        check_seen([("--model", config.model or ""), *inputs, ("--output", output.uri())])
    summaries = _documents(config, output, tasks)
    _write_rejected(output, tasks, summaries)
    _check_rejected(config, output, tasks, summaries)
    lengths = read_lengths(documents_places(tasks, output.uri(DOCUMENTS)))
    splits = {name: _rows(config, output, tasks, lengths, form, name) for name in FOLDERS}
    stats = _statistics(tasks, summaries, splits, form)
    stats["chat_template"] = "plain" if plain else "the tokenizer's"
    with output.stage("stats.json") as path:
        path.write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
    print(_report(output, stats))
    return stats


# Reading --------------------------------------------------------------------------------------------------------------


def _write_tasks(config: TasksConfig, output: OutputFolder) -> list[Source]:
    """Generate the tasks as files of chats in the output."""
    counts = {"train": config.count, "held_out": config.held_out}
    sources = []
    for split in SPLITS:
        name = f"tasks/{split}.jsonl"
        if counts[split] == 0:
            continue
        with output.stage(name) as path, path.open("w", encoding="utf-8") as file:
            for task in generate(split, counts[split], config.seed):
                file.write(json.dumps(task.chat(), ensure_ascii=False) + "\n")
        size = output.filesystem.size(output.place(name))
        sources.append(Source(InputFile(output.uri(name), size), 1.0 if split == "held_out" else 0.0))
    return sources


def _read_tasks(config: PrepareConfig, sources: Sequence[Source]) -> list[ReadTask]:
    shards = cut([source.file for source in sources], config.read.shard_bytes)
    return [
        ReadTask(
            shard,
            Reading(
                model=config.model,
                format=config.read.format,
                over_long=config.read.over_long,
                context_length=config.pack.context_length,
                max_line_bytes=config.read.max_line_bytes,
                held_out=sources[shard.file_index].held_out,
            ),
        )
        for shard in shards
    ]


def _documents(config: PrepareConfig, output: OutputFolder, tasks: Sequence[ReadTask]) -> list[Summary]:
    """Stage 1: read, render, tokenize. One summary a task, in order."""
    found: dict[int, Summary] = {}
    with Progress("reading", total=len(tasks), unit="shards") as progress:
        for index, summary in make_all_documents(tasks, output.uri(DOCUMENTS), config.workers):
            found[index] = summary
            progress.update(len(found), documents=float(sum(s.train.documents for s in found.values())))
    return [found[index] for index in range(len(tasks))]


def _write_rejected(output: OutputFolder, tasks: Sequence[ReadTask], summaries: Sequence[Summary]) -> None:
    """Join the shards' rejected lines, numbered within their file."""
    with output.stage("rejected.jsonl") as path, path.open("w", encoding="utf-8") as joined:
        for task, offset in zip(tasks, _line_offsets(tasks, summaries), strict=True):
            uri = task.shard.file.uri
            for line, reason in _rejected_of(output, task):
                joined.write(json.dumps({"file": uri, "line": line + offset, "reason": reason}) + "\n")


def _line_offsets(tasks: Sequence[ReadTask], summaries: Sequence[Summary]) -> Iterator[int]:
    """Lines of the same file before each shard."""
    before: Counter[int] = Counter()
    for task, summary in zip(tasks, summaries, strict=True):
        yield before[task.shard.file_index]
        before[task.shard.file_index] += summary.lines


def _rejected_of(output: OutputFolder, task: ReadTask) -> Iterator[tuple[int, str]]:
    with output.filesystem.open(output.place(f"{DOCUMENTS}/{rejected_name(task.shard)}"), "rb") as file:
        for line in file:
            number, reason = json.loads(line)
            yield number, reason


def _check_rejected(
    config: PrepareConfig, output: OutputFolder, tasks: Sequence[ReadTask], summaries: Sequence[Summary]
) -> None:
    """Raises UserError when more lines were rejected than allowed, or nothing is left."""
    rejected = _rejected(summaries)
    total, most = sum(rejected.values()), config.read.max_rejected
    listed = f"see {output.uri('rejected.jsonl')}"
    if most is not None and total > most:
        raise UserError(
            f"{total} lines were rejected ({_reasons(rejected)}), more than --read.max_rejected {most}: {listed}."
        )
    if any(summary.train.documents for summary in summaries):
        return
    if any(summary.held_out.documents for summary in summaries):
        raise UserError("Every document was held out: lower --held_out, or give more data.")
    files = sorted({task.shard.file.uri for task in tasks})
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    why = f"all lines were rejected ({_reasons(rejected)}), {listed}" if total else "there are no lines"
    raise UserError(f"No valid chat is left in {where}: {why}.")


def _rejected(summaries: Sequence[Summary]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for summary in summaries:
        counts.update(summary.rejected)
    return dict(sorted(counts.items()))


def _reasons(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in rejected.items())


# Packing --------------------------------------------------------------------------------------------------------------


def _rows(
    config: PrepareConfig,
    output: OutputFolder,
    tasks: Sequence[ReadTask],
    lengths: Lengths,
    form: RowFormat,
    split: str,
) -> dict[str, Any]:
    """Stage 2 for one split: plan and write its rows. Returns the split's figures."""
    members = np.flatnonzero(lengths.held_out == (split == "held_out"))
    packing = plan_rows(
        lengths.length[members],
        block_size=form.block_size,
        context_length=form.context_length,
        seed=config.seed,
    )
    layout = Layout(members, packing, lengths.bounds, tuple(documents_places(tasks, output.uri(DOCUMENTS))))
    files = [
        Part(first, last, output.uri(f"{FOLDERS[split]}part-{number:05d}.parquet"))
        for number, (first, last) in enumerate(parts(packing, ROWS_PER_PART))
    ]
    with Progress(f"packing {split}", total=len(files), unit="files") as progress:
        for _ in write_all_parts(files, layout, form, config.workers):
            progress.advance()
    tokens, supervised = int(lengths.length[members].sum()), int(lengths.supervised[members].sum())
    return {
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": _share(supervised, tokens),
        "rows": packing.row_count,
        "fill": _share(tokens, packing.row_count * form.context_length),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _statistics(
    tasks: Sequence[ReadTask], summaries: Sequence[Summary], splits: Mapping[str, dict[str, Any]], form: RowFormat
) -> dict[str, Any]:
    """stats.json: the training documents' figures, the held-out ones' under held_out, what was read and rejected."""
    train, held_out = Counts(), Counts()
    files: dict[str, dict[str, Any]] = {}
    for task, summary in zip(tasks, summaries, strict=True):
        train.add(summary.train)
        held_out.add(summary.held_out)
        file = files.setdefault(
            task.shard.file.uri, {"format": summary.format, "lines": 0, "documents": 0, "rejected": 0}
        )
        file["lines"] += summary.lines
        file["documents"] += summary.train.documents + summary.held_out.documents
        file["rejected"] += sum(summary.rejected.values())
    rejected = _rejected(summaries)
    return {
        **asdict(train),
        **splits["train"],
        "held_out": {**asdict(held_out), **splits["held_out"]},
        "rejected": sum(rejected.values()),
        "rejected_by_reason": rejected,
        "files": files,
        **asdict(form),
    }


def _report(output: OutputFolder, stats: Mapping[str, Any]) -> str:
    lines = [
        f"{stats['documents']:,} documents with {stats['turns']:,} turns: {stats['tokens']:,} tokens, "
        f"{stats['supervised_share']:.0%} of them supervised.",
        f"{stats['rows']:,} rows of {stats['context_length']:,} tokens, {stats['fill']:.1%} full, in {output.uri()}.",
    ]
    if stats["held_out"]["documents"]:
        held = stats["held_out"]
        lines.append(f"Held out: {held['documents']:,} documents in {held['rows']:,} rows.")
    if stats["split"] or stats["truncated"] or stats["dropped"]:
        lines.append(
            f"Longer than a row: {stats['split']:,} documents split, {stats['truncated']:,} cut, "
            f"{stats['dropped']:,} pieces without supervised tokens dropped."
        )
    if stats["unrolled"]:
        lines.append(
            f"{stats['unrolled']:,} chats became one document per answer: the template rewrites earlier turns."
        )
    if stats["rejected"]:
        reasons = _reasons(stats["rejected_by_reason"])
        lines.append(f"Rejected: {stats['rejected']:,} lines ({reasons}), see {output.uri('rejected.jsonl')}.")
    return "\n".join(lines)


def _clear(output: OutputFolder) -> None:
    """Remove the documents between the stages."""
    place = output.place(DOCUMENTS)
    if output.filesystem.exists(place):
        output.filesystem.rm(place, recursive=True)


if __name__ == "__main__":
    sys.exit(main("prepare", PrepareConfig, run, plan))
