"""Chats in, packed rows out.

    python pipelines/prepare.py --model MODEL --data chats.jsonl --output rows
    python pipelines/prepare.py --model MODEL --data a.jsonl owner/dataset s3://bucket/c --mixture.weights 2 1 1
    python pipelines/prepare.py --output rows                # the project's own tasks, for the demo's base model

Ray Data reads the files in shards, renders every chat with the tokenizer's own template and marks what the assistant
wrote; the driver plans from the documents' lengths which of them are taken (pipelines/chats/mixture.py) and in which
row they lie (pipelines/chats/pack.py); Ray Data writes the rows. A worker holds a batch of lines or a file of rows,
never a file of chats; the driver holds about 40 bytes a document. The output folder:

    part-00000.parquet ...    packed rows: input_ids, labels, document_ids, position_ids
    held_out/part-...         the rows of held-out documents, when there are any
    tasks/*.jsonl             the generated chats, when --data is absent
    stats.json                documents, turns, tokens, supervised share, rows, fill, splits, rejects; for each file too
    report.html, lengths.png  the same to look at, with examples: what the model learns is coloured
    rejected.jsonl            file, line and reason of every line that could not be used
    manifest.json             configuration, input hashes, versions, figures, checksums of all these files

Every file appears by rename, so the same command goes on after any interruption, with what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from model.errors import UserError
from pipelines.chats.documents import Reading, Summary, encoder_of
from pipelines.chats.mixture import Portion, Recipe, mix
from pipelines.chats.nodes import check_seen, several_nodes, wait_for_cpus
from pipelines.chats.pack import parts, plan_rows
from pipelines.chats.publishing import checksum, remove_partials
from pipelines.chats.rejects import REJECTED, check_rejected, write_rejected
from pipelines.chats.report import REPORTS, told, write_reports
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
from pipelines.chats.statistics import split_figures, statistics
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
from pipelines.tasks import SPLITS, generate, kinds_named

DOCUMENTS = ".documents"  # tokenized documents, between the two stages
FOLDERS = {"train": "", "held_out": "held_out/"}


class TasksConfig(Section):
    """The project's own tasks, used when --data is absent."""

    count: int = Field(2000, ge=1, description="generated tasks to train on")
    held_out: int = Field(200, ge=0, description="generated tasks that are kept out of training; none is in both")
    seed: int = Field(0, ge=0, description="seed that chooses the tasks and their order")
    kinds: tuple[str, ...] = Field((), description="kinds of tasks, such as json_person; none: all of them")


class MixtureConfig(Section):
    """How much is taken of each source; without weights every document is taken once."""

    weights: tuple[float, ...] = Field(
        (), description="share of the training tokens from each word of --data, in any unit; 0 leaves one out"
    )
    tokens: int | None = Field(
        None, ge=1, description="training tokens in all; null: as many as mixture.repeat passes over the sources allow"
    )
    repeat: float = Field(1.0, gt=0, le=1000, description="most passes over a source; above 1 its documents come again")

    @model_validator(mode="after")
    def _weights_are_shares(self) -> MixtureConfig:
        if self.weights and (min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError(f"mixture.weights {self.weights} must be at least 0, and not all of them 0")
        if not self.weights and (self.tokens is not None or self.repeat != 1):
            raise ValueError("mixture.tokens and mixture.repeat need mixture.weights, one for each word of --data")
        return self


class PrepareConfig(JobConfig):
    """Turn chats into packed rows for adaptation: tokens, what the assistant wrote, and block-aligned rows."""

    held_out: float = Field(
        0.0, ge=0, lt=1, description="share of the documents of --data to keep out of training, chosen by their content"
    )
    workers: int | None = Field(
        None, ge=1, description="tasks that run at once; null: as many as CPUs", json_schema_extra=NOT_IDENTITY
    )
    rows_per_file: int = Field(2048, ge=1, description="rows in a file; a worker holds the rows of one")
    read: ReadConfig = ReadConfig()
    mixture: MixtureConfig = MixtureConfig()
    pack: PackConfig = PackConfig()
    tasks: TasksConfig = TasksConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _a_weight_a_source(self) -> PrepareConfig:
        check_shares(self.mixture, self.data)
        return self


def check_shares(mixture: MixtureConfig, data: Sequence[str]) -> None:
    """Raises ValueError unless the words of --data have a weight each, or none has."""
    weights, words = len(mixture.weights), len(data)
    if weights not in (0, words):
        raise ValueError(f"mixture.weights has {weights} numbers, --data has {words} words: give one weight each")


@dataclass(frozen=True)
class Source:
    """A file of chats and the share of its documents to hold out (1.0: all of them)."""

    file: InputFile
    held_out: float


@dataclass(frozen=True)
class Made:
    """What a run has made: the content of stats.json, and the checksums of the output's files by name."""

    stats: dict[str, Any]
    checksums: dict[str, str]


def run(config: PrepareConfig) -> dict[str, Any]:
    """Do the job and return its figures (the content of stats.json); a finished output is left as it is."""
    assert config.output is not None, "jobkit settles the output"
    files = find_files(config.data)
    with OutputFolder(
        config.output, job="prepare", config=config, inputs=hash_inputs(file.uri for file in files)
    ) as output:
        if output.finished is None:
            made = _prepare_or_forget(config, output, files)
            seeds = {"tasks.seed": config.tasks.seed} if not files else {}
            output.finish(made.stats, seeds=seeds, files=made.checksums)
        else:
            print(f"{output.uri()} is finished: nothing to do.")
        _clear(output)
        assert output.finished is not None
        figures: dict[str, Any] = output.finished["figures"]
        return figures


def _prepare_or_forget(config: PrepareConfig, output: OutputFolder, files: Sequence[InputFile]) -> Made:
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
        "rows_per_file": config.rows_per_file,
        "cpus_per_task": 1,
        "tasks_at_once": config.workers or "as many as CPUs",
    }


def _prepare(config: PrepareConfig, output: OutputFolder, sources: list[Source]) -> Made:
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
    write_rejected(output, DOCUMENTS, tasks, summaries)
    check_rejected(summaries, config.read.max_rejected, tasks, output.uri(REJECTED))
    lengths = read_lengths(documents_places(tasks, output.uri(DOCUMENTS)))
    packing = Packing(config, output, tasks, lengths, form)
    members, portions = packing.training_members()
    train, checksums = packing.write("train", members)
    held_out, more = packing.write("held_out", np.flatnonzero(lengths.held_out))
    stats = statistics(tasks, summaries, lengths, {"train": train, "held_out": held_out}, form)
    if portions:
        stats["mixture"] = [portion.figures(stats["tokens"]) for portion in portions]
    stats["chat_template"] = "plain" if plain else "the tokenizer's"
    write_reports(output, stats, tasks, lengths, output.uri(DOCUMENTS), encoder_of(config.model).tokenizer)
    others = (*REPORTS, REJECTED, *_task_files(sources, config.tasks))
    print(told(stats, output))
    return Made(stats, checksums | more | {name: checksum(output.uri(name)) for name in others})


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
            for task in generate(split, counts[split], config.seed, kinds=kinds_named(config.kinds)):
                file.write(json.dumps(task.chat(), ensure_ascii=False) + "\n")
        size = output.filesystem.size(output.place(name))
        sources.append(Source(InputFile(output.uri(name), size), 1.0 if split == "held_out" else 0.0))
    return sources


def _task_files(sources: Sequence[Source], config: TasksConfig) -> list[str]:
    """The files of generated tasks in the output."""
    counts = {"train": config.count, "held_out": config.held_out}
    return [] if sources else [f"tasks/{split}.jsonl" for split in SPLITS if counts[split]]


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


# Packing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """Stage 2: plan and write rows of documents that stage 1 has left."""

    config: PrepareConfig
    output: OutputFolder
    tasks: Sequence[ReadTask]
    lengths: Lengths
    form: RowFormat

    def training_members(self) -> tuple[np.ndarray, list[Portion]]:
        """The training documents, and what the mixture takes of each source."""
        members = np.flatnonzero(~self.lengths.held_out)
        mixture = self.config.mixture
        if not mixture.weights:
            return members, []
        source_of = np.repeat([task.shard.file.source for task in self.tasks], np.diff(self.lengths.bounds))
        recipe = Recipe(self.config.data, mixture.weights, mixture.tokens, mixture.repeat, self.config.seed)
        taken, portions = mix(recipe, self.lengths.length[members], source_of[members])
        if not len(taken):
            raise UserError("The mixture takes no document: raise --mixture.tokens or --mixture.repeat.")
        return members[taken], portions

    def write(self, split: str, members: np.ndarray) -> tuple[dict[str, Any], dict[str, str]]:
        """Write the rows of some documents; (the split's figures, the files' checksums)."""
        block, row = self.form.block_size, self.form.context_length
        plan = plan_rows(self.lengths.length[members], block_size=block, context_length=row, seed=self.config.seed)
        layout = Layout(
            members, plan, self.lengths.bounds, tuple(documents_places(self.tasks, self.output.uri(DOCUMENTS)))
        )
        stretches = list(parts(plan, self.config.rows_per_file))
        names = [f"{FOLDERS[split]}part-{number:05d}.parquet" for number in range(len(stretches))]
        files = [Part(*stretch, self.output.uri(name)) for stretch, name in zip(stretches, names, strict=True)]
        checksums: dict[str, str] = {}
        with Progress(f"packing {split}", total=len(files), unit="files") as progress:
            for index, digest in write_all_parts(files, layout, self.form, self.config.workers):
                checksums[names[index]] = digest
                progress.advance()
        return split_figures(self.lengths, members, plan, self.form), checksums


def _clear(output: OutputFolder) -> None:
    """Remove the documents between the stages, and what killed writers left."""
    place = output.place(DOCUMENTS)
    if output.filesystem.exists(place):
        output.filesystem.rm(place, recursive=True)
    for folder in FOLDERS.values():
        remove_partials(output.uri(folder.rstrip("/")))


if __name__ == "__main__":
    sys.exit(main("prepare", PrepareConfig, run, plan))
