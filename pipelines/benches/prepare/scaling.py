"""The job itself on a local Ray: wall clock and CPU seconds by workers, memory by the size of the data.

CPU seconds are those of the driver, of Ray and of its workers; the workers are there and warm before, as in a job of
some length. Memory is private memory: the object store is bounded by its own setting.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pipelines import prepare
from pipelines.benches.prepare.config import PrepareBenchConfig
from pipelines.benches.prepare.data import Setting, repeated
from pipelines.benches.prepare.tree import MIB, Watched, watched
from pipelines.jobkit import ReadConfig, connect_ray

OF_MEMORY = ("documents", "tokens", "driver MiB", "worker MiB", "all MiB")


def measure_scaling(
    config: PrepareBenchConfig, setting: Setting, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Lines of the table and ratios."""
    size = config.copies * sum(path.stat().st_size for path in setting.files.values())
    data = repeated(setting.files, folder, size)
    _start_ray(config)
    _job(config, setting, data, folder / "warm", max(config.workers))
    runs: dict[int, list[dict[str, Any]]] = {workers: [] for workers in config.workers}
    for number in range(config.rounds):
        for workers in config.workers if number % 2 == 0 else config.workers[::-1]:
            line = _timed(config, setting, data, folder / f"{workers}-{number}", workers)
            runs[workers].append(line)
    table = [_median(lines, "wall s") for lines in runs.values()]
    return [{"part": "workers", "workers": w, **line} for w, line in zip(runs, table, strict=True)], _ratios(
        config.workers, table
    )


def measure_memory(
    config: PrepareBenchConfig, setting: Setting, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Peaks of the job on data of several object stores; each once, since a peak hardly depends on the machine's load,
    as times do, which are left out."""
    _start_ray(config)
    workers = max(config.workers)
    _job(config, setting, repeated(setting.files, folder, 1), folder / "warm-memory", workers)
    table = []
    for stores in config.stores:
        data = repeated(setting.files, folder, int(stores * config.object_store_mib * MIB))
        line = _timed(config, setting, data, folder / f"memory-{stores:g}", workers)
        seen = {name: line[name] for name in OF_MEMORY}
        table.append({"part": "memory", "object stores": stores, "data MiB": data.stat().st_size / MIB, **seen})
        data.unlink()
    first, last = table[0], table[-1]
    name = f"at {last['object stores']:g} object stores over {first['object stores']:g}"
    peaks = {kind: last[f"{kind} MiB"] / first[f"{kind} MiB"] for kind in ("driver", "worker")}
    return table, {f"{kind}'s peak memory, {name}": ratio for kind, ratio in peaks.items()}


def _start_ray(config: PrepareBenchConfig) -> None:
    connect_ray(object_store_bytes=config.object_store_mib * MIB)


def _timed(config: PrepareBenchConfig, setting: Setting, data: Path, output: Path, workers: int) -> dict[str, Any]:
    began = time.perf_counter()
    with watched() as seen:
        stats = _job(config, setting, data, output, workers)
    return _line(stats, time.perf_counter() - began, seen)


def _line(stats: dict[str, Any], wall_s: float, seen: Watched) -> dict[str, Any]:
    return {
        "documents": stats["pieces"],
        "tokens": stats["tokens"],
        "wall s": wall_s,
        "tokens/s": stats["tokens"] / wall_s,
        "CPU s": seen.cpu_s,
        "CPU s per million": seen.cpu_s / stats["tokens"] * 1e6,
        "driver MiB": seen.driver / MIB,
        "worker MiB": seen.worker / MIB,
        "all MiB": seen.whole / MIB,
    }


def _job(config: PrepareBenchConfig, setting: Setting, data: Path, output: Path, workers: int) -> dict[str, Any]:
    return prepare.run(
        prepare.PrepareConfig(
            model=str(setting.tokenizer),
            data=(str(data),),
            output=str(output),
            workers=workers,
            read=ReadConfig(shard_bytes=config.shard_bytes),
            pack=config.pack,
        )
    )


def _median(lines: list[dict[str, Any]], by: str) -> dict[str, Any]:
    """The line in the middle."""
    return sorted(lines, key=lambda line: float(line[by]))[len(lines) // 2]


def _ratios(workers: tuple[int, ...], table: list[dict[str, Any]]) -> dict[str, float]:
    one, base = table[0], workers[0]
    found: dict[str, float] = {}
    for count, line in list(zip(workers, table, strict=True))[1:]:
        found[f"speed of {count} workers over {base}"] = one["wall s"] / line["wall s"]
        found[f"CPU seconds a token of {count} workers over {base}"] = (
            line["CPU s per million"] / one["CPU s per million"]
        )
    return found
