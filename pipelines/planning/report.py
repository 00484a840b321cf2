"""A forecast as people and scripts read it: one plain dictionary, tables on the terminal, a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.assessment.report import PLAIN_WIDTH, markdown_table
from pipelines.planning.forecast import Forecast, Remedy
from pipelines.planning.hardware import GB
from pipelines.planning.published import Check, check_published
from pipelines.planning.setup import STATE_WIDTH

NOTES = (
    "Memory is counted tensor by tensor; bench `memory` compares it with real runs of 1, 2 and 4 ZeRO-3 workers on "
    "CPUs. On GPUs the CUDA context (1.6 GB) and 5% for the allocator are assumed: nothing was measured on one.",
    "Time rests on one calibrated number, assume.efficiency, chosen so that one value meets both published times; "
    "everything else is counted or assumed as docs/planning.md says. Another cluster, another network or another data "
    "loader has another efficiency: take your own after a hundred steps (adapt shows tokens/s).",
)


# --------------------------------------------------------------------------------------------------------- the content
def as_dict(made: Forecast, largest: int, would_fit: Sequence[Remedy], price: float | None) -> dict[str, Any]:
    """Everything that was found, in plain values; sizes in 10^9 bytes, times in seconds and hours."""
    return {
        "fits": made.fits,
        "model": _model(made),
        "cluster": _cluster(made),
        "memory": _memory(made, largest),
        "would_fit": [{"change": one.words, "peak_gb": one.peak / GB} for one in would_fit] if not made.fits else [],
        "step": _step(made),
        "run": _run(made, price),
        "published": [_check(check) for check in check_published()],
    }


def _model(made: Forecast) -> dict[str, Any]:
    shape = made.shape
    return {
        "name": shape.name,
        "parameters": shape.parameters,
        "in_layers": shape.matrices,
        "embedding": shape.embedding,
        "tied": shape.tied,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "mixture_of_experts": shape.mixture,
    }


def _cluster(made: Forecast) -> dict[str, Any]:
    gpu = made.cluster.gpu
    return {
        "text": made.cluster.text,
        "workers": made.cluster.workers,
        "tflops": gpu.tflops,
        "memory_gb": gpu.memory_gb,
        "bandwidth_gbs": gpu.bandwidth_gbs,
        "link_gbs": gpu.link_gbs,
        "network_gbit": gpu.network_gbit,
        "source": gpu.source,
    }


def _memory(made: Forecast, largest: int) -> dict[str, Any]:
    memory, setup = made.memory, made.setup
    return {
        "zero_stage": setup.zero_stage,
        "activation_checkpointing": setup.checkpointing,
        "micro_rows": setup.micro_rows,
        "largest_micro_rows": largest,
        "network_tokens": round(setup.micro_tokens),
        "kinds_gb": {name: size / GB for name, size in memory.kinds.items()},
        "peak_gb": memory.peak / GB,
        "host_gb_per_node": memory.host * made.cluster.gpus_per_node / GB,
    }


def _step(made: Forecast) -> dict[str, Any]:
    time, setup = made.time, made.setup
    return {
        "rows": setup.rows_per_step,
        "row_tokens": setup.rows_per_step * setup.row_tokens,
        "micro_steps": setup.micro_steps,
        "operations": made.work.operations,
        "seconds_by_kind": {
            "matrix products": time.compute.products,
            "attention": time.compute.attention,
            "norms, gates, casts": time.compute.narrow,
            "optimizer": time.compute.update,
            "communication that nothing hides": time.exposed,
            "offloading": time.offload,
        },
        "seconds": time.step,
        "communication_seconds": time.communication,
        "gathered_gb_per_worker": made.traffic.gathers / GB,
        "reduced_gb_per_worker": made.traffic.reductions / GB,
        "row_tokens_per_second": made.row_tokens_per_second,
        "mfu": made.mfu,
    }


def _run(made: Forecast, price: float | None) -> dict[str, Any]:
    return {
        "steps": made.steps,
        "row_tokens": made.steps * made.setup.rows_per_step * made.setup.row_tokens,
        "hours": made.hours,
        "gpu_hours": made.gpu_hours,
        "cost": None if price is None else made.gpu_hours * price,
        "checkpoint_gb": 3 * STATE_WIDTH * made.shape.parameters * made.setup.trainable / GB,
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "model": check.run.model,
        "steps": check.run.steps,
        "published_hours": check.run.hours,
        "forecast_hours": check.forecast.hours,
        "error": check.error,
        "implied_efficiency": check.implied,
        "implied_mfu": check.implied_mfu,
        "forecast_hours_calibrated_on_the_other": check.left_out,
    }


# ---------------------------------------------------------------------------------------------------------- the tables
def _tables(content: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of every table."""
    return [
        _memory_table(content),
        _step_table(content),
        _run_table(content),
        *([_remedy_table(content)] if content["would_fit"] else []),
        _check_table(content),
    ]


def _memory_table(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    memory, have = content["memory"], content["cluster"]["memory_gb"]
    rows = [[name, _size(size)] for name, size in memory["kinds_gb"].items()]
    rows += [
        ["peak (see below)", _size(memory["peak_gb"])],
        ["a GPU has", _size(have)],
        ["largest micro_rows that fits", str(memory["largest_micro_rows"] or "none")],
    ]
    if memory["host_gb_per_node"]:
        rows.append(["offloaded, in a node's own memory", _size(memory["host_gb_per_node"])])
    how = "with" if memory["activation_checkpointing"] else "without"
    rows_text = f"{memory['micro_rows']} row{'' if memory['micro_rows'] == 1 else 's'} in a forward"
    title = f"Memory of one GPU: ZeRO-{memory['zero_stage']}, {rows_text}, {how} activation checkpointing"
    return title, ["kind", "GB"], rows


def _step_table(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    step = content["step"]
    rows = [[name, f"{seconds:.3g} s"] for name, seconds in step["seconds_by_kind"].items() if seconds]
    rows += [
        ["a step", f"{step['seconds']:.3g} s"],
        ["row tokens per second, all GPUs", f"{step['row_tokens_per_second']:,.0f}"],
        ["share of the peak (MFU)", f"{step['mfu']:.1%}"],
        ["parameters that a GPU gathers", f"{step['gathered_gb_per_worker']:,.1f} GB"],
        ["gradients that a GPU reduces", f"{step['reduced_gb_per_worker']:,.1f} GB"],
        ["communication, were nothing else done", f"{step['communication_seconds']:.3g} s"],
    ]
    title = f"One step: {step['rows']:,} rows, {step['row_tokens']:,} tokens, {step['micro_steps']} forwards a worker"
    return title, ["", ""], rows


def _run_table(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    run = content["run"]
    rows = [
        ["steps", f"{run['steps']:,}"],
        ["row tokens", f"{run['row_tokens']:,}"],
        ["hours", f"{run['hours']:.1f}"],
        ["GPU-hours", f"{run['gpu_hours']:,.0f}"],
        ["one checkpoint on storage", f"{run['checkpoint_gb']:.1f} GB"],
    ]
    if run["cost"] is not None:
        rows.insert(4, ["cost", f"{run['cost']:,.0f}"])
    return "The run", ["", ""], rows


def _remedy_table(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    rows = [[one["change"], _size(one["peak_gb"])] for one in content["would_fit"]]
    return "It does not fit; with this it would", ["change", "peak, GB"], rows


def _check_table(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    columns = ["published run, 64 A100", "hours", "forecast", "error", "implied efficiency", "implied MFU", "left out"]
    rows = [
        [
            one["model"].rpartition("/")[2],
            f"{one['published_hours']:g}",
            f"{one['forecast_hours']:.1f}",
            f"{one['error']:+.0%}",
            f"{one['implied_efficiency']:.2f}",
            f"{one['implied_mfu']:.0%}",
            f"{one['forecast_hours_calibrated_on_the_other']:.1f}",
        ]
        for one in content["published"]
    ]
    return "How far to trust the time (left out: calibrated on the other run alone)", columns, rows


def _size(gigabytes: float) -> str:
    return f"{gigabytes:,.2f}" if gigabytes < 100 else f"{gigabytes:,.0f}"


def headline(content: Mapping[str, Any]) -> str:
    """One line: the model, the cluster, whether it fits, how long."""
    model, run, memory = content["model"], content["run"], content["memory"]
    verdict = "fits" if content["fits"] else "does not fit"
    return (
        f"{model['name']}, {model['parameters'] / GB:.2f} billion parameters, on {content['cluster']['text']}: "
        f"{verdict} ({memory['peak_gb']:.1f} of {content['cluster']['memory_gb']:g} GB a GPU), "
        f"{run['hours']:.1f} hours, {run['gpu_hours']:,.0f} GPU-hours."
    )


def print_plan(content: Mapping[str, Any]) -> None:
    """Everything on the terminal."""
    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    console.print(f"plan: {headline(content)}", highlight=False)
    for title, columns, rows in _tables(content):
        console.print(f"\n{title}", style="bold", highlight=False)
        table = Table(box=box.SIMPLE_HEAD if any(columns) else box.SIMPLE, show_header=any(columns))
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in _notes(content):
        console.print(f"  {note}", highlight=False, soft_wrap=False)


def markdown(content: Mapping[str, Any]) -> str:
    """The report."""
    parts = ["# Plan", headline(content)]
    for title, columns, rows in _tables(content):
        parts += [f"## {title}", markdown_table([name or " " for name in columns], rows)]
    parts += ["## What this rests on", *(f"- {note}" for note in _notes(content))]
    return "\n\n".join(parts) + "\n"


def _notes(content: Mapping[str, Any]) -> list[str]:
    cluster = content["cluster"]
    rates = (
        f"Rates of {cluster['text']}: {cluster['tflops']:g} TFLOP/s, {cluster['bandwidth_gbs']:g} GB/s memory, "
        f"{cluster['link_gbs']:g} GB/s between GPUs of a node, {cluster['network_gbit']:g} Gbit/s a node "
        f"({cluster['source']})."
    )
    peak = (
        "The peak is what stays (weights, gradients, optimizer, buckets, context) with the larger of two: gathered "
        "parameters, activations and the larger of loss and layer; or the optimizer step."
    )
    return [peak, rates, *NOTES]
