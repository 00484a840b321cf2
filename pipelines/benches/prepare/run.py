"""All parts of `bench prepare`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipelines.benches.prepare.config import PrepareBenchConfig
from pipelines.benches.prepare.core import measure_core
from pipelines.benches.prepare.data import make_setting
from pipelines.benches.prepare.scaling import measure_memory, measure_scaling
from pipelines.benches.result import Result, machine


def run_prepare(config: PrepareBenchConfig) -> Result:
    """Measure the parts that are asked for."""
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with TemporaryDirectory(prefix="blockcast-bench-") as name:
        folder = Path(name)
        setting = make_setting(config, folder)
        if "core" in config.parts:
            lines, found = measure_core(config, setting)
            table, ratios = table + lines, ratios | found
        for part, measure in (("scaling", measure_scaling), ("memory", measure_memory)):
            if part in config.parts:
                lines, found = measure(config, setting, folder)
                table, ratios = table + lines, ratios | found
    note = (
        f"Chats to rows of {config.pack.context_length} tokens in blocks of {config.pack.block_size}, tokenizer of "
        f"{setting.name}."
    )
    if "core" in config.parts:
        note += " The published way through datasets.map drops what is left at a batch's end."
    if "memory" in config.parts:
        note += f" Peaks of private memory, an object store is {config.object_store_mib} MiB."
    rounds = config.rounds if set(config.parts) - {"memory"} else 1
    return Result("prepare", machine("int32"), rounds, table, ratios, note)
