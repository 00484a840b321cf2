"""A bench's result: the JSON of DESIGN "bench output", the table on the terminal, the Markdown of several of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table

from model.demo_base import NAME, demo_base_model
from model.errors import UserError
from pipelines.assessment.contenders import plain_name
from pipelines.assessment.report import PLAIN_WIDTH, markdown_table
from pipelines.jobkit import JobConfig, OutputFile
from pipelines.jobkit.machine import describe_machine, machine_text

NAMES = ("decoder", "fault")  # columns of names, not of numbers
NAME_WIDTH = 20  # columns of the terminal that they get at least


class BenchConfig(JobConfig):
    """What every bench has."""

    takes_data: ClassVar[bool] = False
    """Whether --data names what to measure with; the others make their own."""

    rounds: int = Field(3, ge=1, description="measured rounds; the table shows their medians")


@dataclass(frozen=True)
class Result:
    """machine: what describe_machine says. runs: measured rounds. note: what was measured, in a sentence or two.
    setting: keys that a reader of the JSON needs to compute with it, where there are such."""

    bench: str
    machine: dict[str, Any]
    runs: int
    table: list[dict[str, Any]]
    ratios: dict[str, float]
    note: str
    date: str = field(default_factory=lambda: date.today().isoformat())
    setting: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def machine(dtype: str) -> dict[str, Any]:
    """This machine, for a Result."""
    return describe_machine(dtype, device_name())


def device_name() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def model_of(config: JobConfig) -> tuple[str, str]:
    """(source, name for the table) of --model; absent, the demo's base model."""
    if config.model is None:
        return str(demo_base_model()), NAME
    return config.model, plain_name(config.model)


def publish(config: BenchConfig, output: OutputFile, result: Result) -> dict[str, Any]:
    """Write the JSON and its manifest and print the table; returns the figures."""
    content = result.to_dict()
    output.publish((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    output.finish({"ratios": result.ratios})
    print_result(content)
    print(f"bench {result.bench}: {config.output}", flush=True)
    return content


# ------------------------------------------------------------------------------------------------- tables
def cell_text(value: Any) -> str:
    """A number to three or more significant digits, text as it is, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _tables(content: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(part, columns, rows of cells): a table for each part of a bench, with the columns that its lines have."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for line in content["table"]:
        parts.setdefault(line.get("part", ""), []).append({k: v for k, v in line.items() if k != "part"})
    tables = []
    for part, lines in parts.items():
        columns = list(dict.fromkeys(name for line in lines for name in line))
        tables.append((part, columns, [[cell_text(line.get(name)) for name in columns] for line in lines]))
    return tables


def print_result(content: Mapping[str, Any]) -> None:
    """Tables and ratios on the terminal."""
    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    console.print(f"bench {content['bench']}: {content['note']}", highlight=False)
    for part, columns, rows in _tables(content):
        table = Table(title=part or None, title_justify="left", box=box.SIMPLE_HEAD)
        for index, name in enumerate(columns):
            if name in NAMES:
                table.add_column(name, min_width=min(NAME_WIDTH, max(len(row[index]) for row in rows)))
            else:
                table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, ratio in content["ratios"].items():
        console.print(f"  {name}: {ratio:.2f}", highlight=False)


def markdown_of(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """One Markdown page of (name, content): a list of the results, then a section each, with machine and date."""
    parts = ["# Benches", "Ratios are measured in one run, in turns; figures are medians over the rounds."]
    parts.append("\n".join(f"- [{name}](#{name.lower()}): {_first_sentence(content)}" for name, content in results))
    for name, content in results:
        parts += [
            f"## {name}",
            f"{content['note']} {content['date']}, {content['runs']} rounds, {machine_text(content['machine'])}.",
        ]
        for part, columns, rows in _tables(content):
            parts += [f"### {part}"] if part else []
            parts.append(markdown_table(columns, rows))
        parts += ["\n".join(f"- {what}: **{ratio:.2f}**" for what, ratio in content["ratios"].items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _first_sentence(content: Mapping[str, Any]) -> str:
    return str(content["note"]).split(". ")[0].rstrip(".")


def read_result(path: Path) -> dict[str, Any]:
    """A bench's JSON file. Raises UserError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not the JSON of a bench: {error}") from error
    wanted = {"bench", "machine", "runs", "table", "ratios", "note", "date"}
    if not isinstance(content, dict) or not wanted <= content.keys():
        raise UserError(f"{path} is not the JSON of a bench: write it with `python pipelines/bench.py NAME --output`.")
    return content
