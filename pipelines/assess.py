"""How good and how fast: held-out loss, exact match and tokens/s of a model before and after adaptation.

    python pipelines/assess.py --model adapted --base base --thresholds 1.0 0.9 0.7 --output report

Contenders: the base model and the AR control token by token, the adapted model in AR mode and writing blocks at each
threshold. They answer the same held-out tasks (or the prompts of --prompts, with an optional "answer" each) in turns.
The output folder:

    report.md             table, plot, exact match by kind, and what the numbers do not show
    accuracy_speed.png    exact match against tokens/s, one point a contender
    answers.jsonl         every answer: contender, round, question, text, token ids, usage, forwards, correct
    rounds.jsonl          every turn: contender, round, seconds, completion tokens
    manifest.json         configuration, input hashes, versions, figures
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from actors.training.rows import PackedRows, holds_rows
from model.errors import UserError
from model.loading import model_revision
from model.sources import fetch_model
from pipelines.assessment.contenders import Contender, Subject, find_subjects, make_contenders, plain_name
from pipelines.assessment.figures import Figures, figures_of
from pipelines.assessment.held_out import HeldOutRows, HeldOutTasks, count_parameters, held_out_folder, measure_losses
from pipelines.assessment.journal import Journal, open_journal
from pipelines.assessment.measuring import Settings, measure, split_rounds
from pipelines.assessment.questions import Question, own_questions, task_questions
from pipelines.assessment.report import PLOT, Setting, draw_plot, print_table, report_text
from pipelines.jobkit import NOT_IDENTITY, DecodeSection, EngineSection, JobConfig, OutputFolder, Section, main
from pipelines.jobkit.identity import hash_file, hash_inputs
from pipelines.jobkit.machine import describe_machine

TASKS = 124  # four of each kind
BLOCK_SIZE = 32  # for the held-out loss where no model says another


class TasksSection(Section):
    """The generated held-out tasks, asked where --prompts is absent."""

    count: int | None = Field(
        None, ge=1, description=f"tasks to ask, the kinds taking turns; null: {TASKS}, or none where --prompts is given"
    )
    seed: int = Field(0, ge=0, description="seed that chooses the tasks and their order")


class HeldOutSection(Section):
    """The held-out loss, on packed rows: those of --data, or packed here from held-out tasks."""

    rows: int | None = Field(64, ge=1, description="most rows of --data to measure on; null: all of them")
    tasks: int = Field(200, ge=0, description="held-out tasks to pack where --data is absent; 0 leaves the loss out")
    context_length: int = Field(512, ge=1, description="tokens in a row packed here; a multiple of the block size")
    block_size: int | None = Field(
        None, ge=1, description=f"tokens in a block; null: the adapted model's, or {BLOCK_SIZE} where none was adapted"
    )


class RowsSection(EngineSection):
    """How wide the engine runs: speeds depend on it."""

    max_rows: int = Field(8, ge=1, description="requests decoded together in one forward")


class AssessConfig(JobConfig):
    """Compare a model before and after adaptation: held-out loss, exact match, tokens/s and tokens per forward."""

    base: str | None = Field(None, description="AR model that was adapted: a Hub id, a folder or an fsspec URI")
    control: str | None = Field(None, description="the base after next-token training on the same rows")
    thresholds: tuple[float, ...] | None = Field(
        None, description="one block-decoding contender for each of these confidences; null: one, as decode.* says"
    )
    # Which prompts they are is told by the file's hash, an input of the output.
    prompts: str | None = Field(
        None,
        description='JSONL file of own prompts, each with an optional "answer" (exact text) and "kind"',
        json_schema_extra=NOT_IDENTITY,
    )
    max_tokens: int = Field(128, ge=1, description="longest answer in tokens where a prompt does not say")
    tasks: TasksSection = TasksSection()
    held_out: HeldOutSection = HeldOutSection()
    decode: DecodeSection = DecodeSection()
    engine: RowsSection = RowsSection()


def run(config: AssessConfig) -> dict[str, Any]:
    """Measure, write the report and return its figures."""
    subjects, contenders, questions = _checked(config)
    inputs = _inputs(config, subjects)
    with OutputFolder(str(config.output), job="assess", config=config, inputs=inputs) as output:
        if output.finished is not None:
            print(f"{output.uri()} is finished: see {output.uri('report.md')}.")
            finished: dict[str, Any] = output.finished["figures"]
            return finished
        with open_journal(output) as journal:
            settings = _settings(config)
            _measure_losses(config, subjects, settings, journal)
            measure(contenders, questions, settings, journal)
            figures = _publish(config, output, journal, contenders, questions)
            output.finish(figures, seeds={"tasks.seed": config.tasks.seed})
    print(f"assess: the report is {output.uri('report.md')}", flush=True)
    return figures


def plan(config: AssessConfig) -> dict[str, Any]:
    """What --dry-run prints."""
    _, contenders, questions = _checked(config)
    settings = _settings(config)
    return {
        "contenders": [contender.label for contender in contenders],
        "questions": len(questions),
        "rounds": len(split_rounds(questions, settings)),
        "device": settings.device,
    }


# ------------------------------------------------------------------------------------------- what is asked of whom
def _checked(config: AssessConfig) -> tuple[list[Subject], list[Contender], list[Question]]:
    """Subjects, contenders and questions, or a UserError before anything is measured."""
    if len(config.data) > 1 or (config.data and not holds_rows(held_out_folder(config.data[0]))):
        raise UserError(
            "--data must be one folder of packed rows, as prepare writes them; the questions are --prompts."
        )
    for threshold in config.thresholds or ():
        if not 0 < threshold <= 1:
            raise UserError(f"--thresholds must be above 0 and at most 1, not {threshold:g}.")
    subjects = find_subjects(config.model, config.base, config.control, config.decode.mode)
    _block_size(config, subjects)
    return subjects, make_contenders(subjects, config.decode, config.thresholds), _questions(config)


def _inputs(config: AssessConfig, subjects: Sequence[Subject]) -> dict[str, str]:
    """Hashes of what is read, by the name that a message about a change would use."""
    inputs = {f"the {s.role} model": model_revision(fetch_model(s.source)) for s in subjects}
    if config.prompts is not None:
        inputs["the file of --prompts"] = hash_file(_place(config.prompts))
    if config.data:
        folder = held_out_folder(config.data[0])
        inputs |= hash_inputs(f"{folder}/{Path(path).name}" for path in PackedRows(folder).paths)
    return inputs


def _questions(config: AssessConfig) -> list[Question]:
    own = own_questions(_place(config.prompts), config.max_tokens) if config.prompts is not None else []
    count = _task_count(config)
    tasks = task_questions(count, config.tasks.seed, config.max_tokens) if count else []
    return [*own, *tasks]


def _task_count(config: AssessConfig) -> int:
    return config.tasks.count or (0 if config.prompts is not None else TASKS)


def _place(source: str) -> str:
    return source if "://" in source else os.path.abspath(os.path.expanduser(source))


def _block_size(config: AssessConfig, subjects: Sequence[Subject]) -> int:
    """The block of the held-out loss. Raises UserError where rows do not divide into it."""
    adapted = [s.block_diffusion.block_size for s in subjects if s.block_diffusion is not None]
    if config.data:
        return PackedRows(held_out_folder(config.data[0])).format.block_size
    block_size = config.held_out.block_size or (adapted[-1] if adapted else BLOCK_SIZE)
    if config.held_out.tasks and config.held_out.context_length % block_size:
        raise UserError(
            f"--held_out.context_length {config.held_out.context_length} is not a multiple "
            f"of the block size {block_size}."
        )
    return block_size


def _held_out(config: AssessConfig) -> HeldOutTasks | HeldOutRows | None:
    """Where the rows of the held-out loss come from."""
    if config.data:
        return HeldOutRows(held_out_folder(config.data[0]), config.held_out.rows)
    if not config.held_out.tasks:
        return None
    return HeldOutTasks(config.held_out.tasks, config.tasks.seed, config.held_out.context_length)


def _settings(config: AssessConfig) -> Settings:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Settings(config.decode.dtype, device, config.engine.max_rows, config.seed, config.engine.weights)


def _measure_losses(config: AssessConfig, subjects: Sequence[Subject], settings: Settings, journal: Journal) -> None:
    """Journal entries ("loss", role)."""
    source = _held_out(config)
    if source is None:
        return
    block_size = _block_size(config, subjects)
    for subject in subjects:
        if ("loss", subject.role) in journal:
            continue
        losses = measure_losses(
            subject,
            source,
            block_size=block_size,
            dtype=settings.dtype,
            device=settings.device,
            seed=config.seed,
        )
        print(f"assess: {subject.role}: held-out masked loss {losses['masked']:.3f}", file=sys.stderr, flush=True)
        journal.put(("loss", subject.role), losses)


# ------------------------------------------------------------------------------------------------- what comes out
def _publish(
    config: AssessConfig,
    output: OutputFolder,
    journal: Journal,
    contenders: Sequence[Contender],
    questions: Sequence[Question],
) -> dict[str, Any]:
    """Write answers, rounds, plot and report; print the table. Returns the figures."""
    rounds = range(len(split_rounds(questions, _settings(config))))
    turns = [(n, c, journal["round", c.label, n]) for c in contenders for n in rounds]
    _write_lines(output, "answers.jsonl", _answer_lines(turns))
    _write_lines(output, "rounds.jsonl", (_round_line(*turn) for turn in turns))
    figures = [_figures(contender, turns, journal) for contender in contenders]
    setting = _setting(config, journal, contenders, questions)
    if any(one.accuracy.count for one in figures):
        with output.stage(PLOT) as path:
            draw_plot(figures, setting, path)
    with output.stage("report.md") as path:
        path.write_text(report_text(figures, setting), encoding="utf-8")
    print_table(figures)
    losses = {
        c.subject.role: journal["loss", c.subject.role] for c in contenders if ("loss", c.subject.role) in journal
    }
    return {
        "contenders": [one.to_dict() for one in figures],
        "held_out": losses,
        "machine": dict(setting.machine),
    }


Turn = tuple[int, Contender, dict[str, Any]]


def _answer_lines(turns: Iterable[Turn]) -> Iterable[Mapping[str, Any]]:
    for number, contender, value in turns:
        for answer in value["answers"]:
            yield {"contender": contender.label, "round": number, **answer}


def _round_line(number: int, contender: Contender, value: Mapping[str, Any]) -> Mapping[str, Any]:
    tokens = sum(answer["usage"]["completion_tokens"] for answer in value["answers"])
    return {"contender": contender.label, "round": number, "seconds": value["seconds"], "completion_tokens": tokens}


def _write_lines(output: OutputFolder, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    with output.stage(name) as path, Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _figures(contender: Contender, turns: Iterable[Turn], journal: Journal) -> Figures:
    mine = [value for _, other, value in turns if other is contender]
    role = contender.subject.role
    return figures_of(
        contender.label,
        role,
        [answer for value in mine for answer in value["answers"]],
        sum(value["seconds"] for value in mine),
        journal.find(("loss", role)),
    )


def _setting(
    config: AssessConfig, journal: Journal, contenders: Sequence[Contender], questions: Sequence[Question]
) -> Setting:
    settings = _settings(config)
    subjects = list(dict.fromkeys(contender.subject for contender in contenders))
    tasks = _task_count(config)
    sources = [f"{tasks} generated held-out tasks"] if tasks else []
    if config.prompts is not None:
        sources.insert(0, f"the prompts of {plain_name(config.prompts)}")
    losses = [journal["loss", s.role] for s in subjects if ("loss", s.role) in journal]
    return Setting(
        title=f"Assessment of {subjects[-1].name}",
        models={s.role: f"{s.name} ({model_revision(fetch_model(s.source))})" for s in subjects},
        source=" and ".join(sources),
        questions=len(questions),
        max_tokens=config.max_tokens,
        rows=settings.max_rows,
        weights=settings.weights,
        machine=describe_machine(settings.dtype, settings.device),
        parameters=count_parameters(fetch_model(subjects[-1].source)),
        held_out=_held_out_text(config, losses[-1]) if losses else None,
        generated=bool(tasks),
    )


def _held_out_text(config: AssessConfig, losses: Mapping[str, float]) -> str:
    source = _held_out(config)
    assert source is not None, "losses were measured on something"
    return f"{source.text} ({losses['supervised_tokens']:,} supervised tokens in {losses['rows']} rows)"


if __name__ == "__main__":
    sys.exit(main("assess", AssessConfig, run, plan))
