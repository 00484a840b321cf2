"""Tokens a CPU second: our stages and the published way, each alone in this process, on the same files in turns.

Both read the same JSONL with the same template, so both must find the same tokens and supervise the same ones, or the
bench fails. Both write what they make: rows in Parquet here, Arrow files there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from model.backbone import load_tokenizer
from model.errors import JobError
from pipelines.benches.prepare.config import PrepareBenchConfig
from pipelines.benches.prepare.data import Setting
from pipelines.benches.prepare.reference import Grouped, import_datasets, prepare_by_map
from pipelines.benches.timing import Times, take_turns
from pipelines.chats.documents import Reading, documents_name, encoder_of, make_documents
from pipelines.chats.pack import Plan, parts, plan_rows
from pipelines.chats.sources import cut, find_files
from pipelines.chats.stages import Layout, Lengths, Part, read_lengths, write_part
from pipelines.chats.statistics import split_figures

OURS, REFERENCE = "prepare", "datasets.map"
ROWS_PER_FILE = 2048
SHARD_BYTES = 32 << 20


@dataclass(frozen=True)
class Outcome:
    """Of one form: tokens, supervised tokens, rows, and for ours how full they are."""

    tokens: int
    supervised: int
    rows: int
    fill: float | None = None
    token_fill: float | None = None


def measure_core(config: PrepareBenchConfig, setting: Setting) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Lines of the table and ratios, a file at a time."""
    import_datasets()  # before the clock runs
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name, file in setting.files.items():
        seconds, outcomes = _measure(config, setting, name, file)
        _check_same(name, outcomes)
        table += [_line(name, form, seconds, outcomes[form]) for form in (OURS, REFERENCE)]
        ratios[f"tokens a core over datasets.map, {name}"] = seconds.ratio(REFERENCE, OURS)
    return table, ratios


def _measure(config: PrepareBenchConfig, setting: Setting, name: str, file: Path) -> tuple[Times, dict[str, Outcome]]:
    cpu = Times({OURS: [], REFERENCE: []})
    outcomes: dict[str, Outcome] = {}

    def ours(folder: Path) -> Callable[[], Outcome]:
        encoder_of.cache_clear()
        encoder_of(str(setting.tokenizer))
        return lambda: prepare_here(setting, file, folder)

    def reference(folder: Path) -> Callable[[], Outcome]:
        tokenizer = load_tokenizer(setting.tokenizer)
        return lambda: _by_map(setting, file, folder, tokenizer)

    def counted(form: str, made: Callable[[Path], Callable[[], Outcome]]) -> Callable[[], None]:
        """A round of a form, with a tokenizer that was loaded before the clock runs and has seen nothing."""

        def once() -> None:
            with TemporaryDirectory(prefix="blockcast-") as folder:
                call = made(Path(folder))
                before = time.process_time()
                outcomes[form] = call()
                cpu.seconds[form].append(time.process_time() - before)

        return once

    forms = {OURS: counted(OURS, ours), REFERENCE: counted(REFERENCE, reference)}
    take_turns(forms, config.rounds, warm_up=0, title=f"prepare: {name}")
    return cpu, outcomes


def prepare_here(setting: Setting, file: Path, folder: Path) -> Outcome:
    """The stages of pipelines/prepare.py one after the other, without Ray."""
    shards = cut(find_files([str(file)]), SHARD_BYTES)
    form = setting.form
    reading = Reading(str(setting.tokenizer), "messages", "split", form.context_length, SHARD_BYTES, 0.0)
    for shard in shards:
        make_documents(shard, reading, str(folder))
    places = [f"{folder}/{documents_name(shard)}" for shard in shards]
    lengths = read_lengths(places)
    plan = plan_rows(lengths.length, block_size=form.block_size, context_length=form.context_length, seed=0)
    members = np.arange(len(lengths.length))
    layout = Layout(members, plan, lengths.bounds, tuple(places))
    for number, (first, last) in enumerate(parts(plan, ROWS_PER_FILE)):
        write_part(Part(first, last, f"{folder}/part-{number}.parquet"), layout, form)
    return _ours(lengths, members, plan, setting)


def _ours(lengths: Lengths, members: np.ndarray, plan: Plan, setting: Setting) -> Outcome:
    figures = split_figures(lengths, members, plan, setting.form)
    names = ("tokens", "supervised_tokens", "rows", "fill", "token_fill")
    return Outcome(*(figures[name] for name in names))


def _by_map(setting: Setting, file: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Outcome:
    grouped: Grouped = prepare_by_map(file, folder, tokenizer, setting.form)
    return Outcome(grouped.tokens, grouped.supervised, grouped.rows)


def _check_same(name: str, outcomes: dict[str, Outcome]) -> None:
    """Raises JobError where the two sides did not read the same."""
    ours, theirs = outcomes[OURS], outcomes[REFERENCE]
    if ours.tokens != theirs.tokens or ours.supervised != theirs.supervised:
        raise JobError(
            f"{name}: prepare found {ours.tokens} tokens, {ours.supervised} of them supervised, datasets.map "
            f"{theirs.tokens} and {theirs.supervised}: not the same work (documents longer than a row?)."
        )


def _line(name: str, form: str, cpu: Times, outcome: Outcome) -> dict[str, Any]:
    seconds = cpu.median(form)
    return {
        "part": "one core",
        "data": name,
        "form": form,
        "tokens": outcome.tokens,
        "supervised": outcome.supervised,
        "CPU s": seconds,
        "tokens/CPU s": outcome.tokens / seconds,
        "over datasets.map": cpu.ratio(REFERENCE, form),
        "rows": outcome.rows,
        "fill": outcome.fill,
        "real tokens": outcome.token_fill,
    }
