"""The training step: three structured streams against the published form, same rows, weights, precision and threads.

A step is what training pays for: laying out the batch, forward, loss, backward. Three forms:

    reference       two rows of 2L a data row, dense mask through SDPA, the head over both noisy halves
    three streams   [clean | noisy_1 | noisy_2], structured attention, the head at supervised positions
    trained         the same without the blocks that no loss reads: what adapt runs

on two kinds of rows: `full`, one document a row and every token supervised, the hardest case for us; and `tasks`,
packed generated tasks, as the demo trains on. Loss and gradient norm must agree, or the bench fails. Peak memory is
measured in a process for each form. The third part is adapt itself, the whole model on `tasks` rows: what share of a
step's time lies outside forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from model.backbone import Backbone
from model.errors import UserError
from pipelines.benches.result import BenchConfig, Result, machine, model_of
from pipelines.benches.timing import Times, take_turns
from pipelines.benches.train_memory import peak_of
from pipelines.benches.train_shares import measure_shares
from pipelines.benches.train_step import (
    FORMS,
    KINDS,
    REFERENCE,
    STREAMS,
    TRAINED,
    Case,
    Shape,
    Step,
    backward,
    check_equal,
    forward,
    load_model,
    make_case,
    shortened,
    told,
)

MIB = 2**20

Lines = list[dict[str, Any]]
Ratios = dict[str, float]


class TrainBenchConfig(BenchConfig):
    """Time the training step against the published form: tokens/s and peak memory, with equal loss."""

    output_name: ClassVar[str] = "bench/train.json"

    length: tuple[int, ...] = Field((512, 2048), description="tokens in a row, each with each of --rows")
    block_size: int = Field(32, ge=2, description="tokens in a block")
    rows: tuple[int, ...] = Field((1, 4), description="data rows in a step")
    layers: tuple[int, ...] = Field(
        (6,),
        description="decoder layers to keep, one variant each; 0 keeps all (of the demo's model in float32 the "
        "reference needs more than 21 GB for 4 rows of 2,048 tokens with 6 layers: measure those with 2)",
    )
    memory: bool = Field(True, description="also peak memory, of the reference and of what is trained")
    shares: bool = Field(True, description="also where the time of adapt's own steps goes, with all layers")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="number format of the step")


def run_train(config: TrainBenchConfig) -> Result:
    """Measure all cases. Raises JobError where the forms disagree."""
    _check(config)
    source, name = model_of(config)
    table: Lines = []
    ratios: Ratios = {}
    for layers in config.layers:
        backbone = load_model(source, layers, config.block_size, config.dtype)
        for shape in _shapes(config, layers):
            lines, found = _measure(make_case(shape, backbone), source, config)
            table += lines
            ratios |= found
        del backbone
    if config.shares:
        lines, found = _measure_shares(source, config)
        table += lines
        ratios |= found
    note = f"Training steps of {name}, blocks of {config.block_size}"
    note += "; peak memory in a process for each form." if config.memory else "."
    return Result("train", machine(config.dtype), config.rounds, table, ratios, note)


def _check(config: TrainBenchConfig) -> None:
    for length in config.length:
        if length < 1 or length % config.block_size:
            raise UserError(f"--length {length} is not a multiple of --block_size {config.block_size}.")
    if min(config.rows) < 1:
        raise UserError(f"--rows must be at least 1, not {min(config.rows)}.")


def _shapes(config: TrainBenchConfig, layers: int) -> Iterator[Shape]:
    for length, rows, kind in product(config.length, config.rows, KINDS):
        yield Shape(kind, length, rows, layers, config.block_size, config.dtype, config.seed)


def _measure(case: Case, source: str, config: TrainBenchConfig) -> tuple[Lines, Ratios]:
    """Lines and ratios of one case: times, what was computed, peak memory."""
    times, steps = _time(case, config.rounds)
    lines = {form: _line(case, form, times, steps[form]) for form in FORMS}
    ratios = {f"{form} over {REFERENCE}, {case.title}": times.ratio(REFERENCE, form) for form in (STREAMS, TRAINED)}
    if config.memory:
        peaks = {form: peak_of(source, case.shape, form, torch.get_num_threads()) for form in (REFERENCE, TRAINED)}
        for form, peak in peaks.items():
            lines[form] |= {"peak MiB": peak.step / MIB, "process MiB": peak.process / MIB}
        ratios[f"peak memory, {TRAINED} over {REFERENCE}, {case.title}"] = peaks[TRAINED].step / peaks[REFERENCE].step
    return list(lines.values()), ratios


def _time(case: Case, rounds: int) -> tuple[Times, dict[str, Step]]:
    """Times of the three forms and what each computed."""
    steps: dict[str, Step] = {}

    def step(form: str) -> None:
        computed = backward(case, form)
        if form not in steps:
            steps[form] = told(case, *computed)

    for form in FORMS:
        forward(shortened(case), form)[0].backward()
    calls = {form: partial(step, form) for form in FORMS}
    times = take_turns(calls, rounds, warm_up=0, title=f"train: {case.title}")
    case.backbone.model.zero_grad(set_to_none=True)
    for form in (STREAMS, TRAINED):
        check_equal(case.title, form, steps[form], steps[REFERENCE], case.shape.dtype)
    return times, steps


def _line(case: Case, form: str, times: Times, step: Step) -> dict[str, Any]:
    seconds, shape = times.median(form), case.shape
    return {
        "part": "step",
        "rows": shape.kind,
        "batch": f"{shape.rows} x {shape.length}",
        "layers": case.layers,
        "form": form,
        "network tokens": step.tokens,
        "seconds": seconds,
        "data tokens/s": case.rows.input_ids.numel() / seconds,
        "over reference": times.ratio(REFERENCE, form),
        "loss": step.loss,
        "gradient norm": step.gradient_norm,
    }


def _measure_shares(source: str, config: TrainBenchConfig) -> tuple[Lines, Ratios]:
    backbone: Backbone = load_model(source, 0, config.block_size, config.dtype)
    lines: Lines = []
    ratios: Ratios = {}
    for length, rows in product(config.length, config.rows):
        shape = Shape("tasks", length, rows, 0, config.block_size, config.dtype, config.seed)
        shares = measure_shares(source, shape, backbone)
        lines.append({"part": "shares of adapt's steps", "batch": f"{rows} x {length}", **shares})
        ratios[f"time outside forward and backward, adapt, tasks rows, {rows} x {length}"] = shares["outside"]
    return lines, ratios
