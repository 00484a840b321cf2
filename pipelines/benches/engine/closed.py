"""A closed loop: N requests at a time, each that ends making room for the next; AR, blocks, and auto's choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import DecodeConfig
from pipelines.assessment.contenders import AR
from pipelines.benches.engine.contestants import AR_NAME, EngineContestant, compete, line, over
from pipelines.benches.engine.setting import PartResult, Setting
from pipelines.benches.timing import Times

BLOCKS, AUTO = "blocks", "auto"


def measure_closed(setting: Setting) -> PartResult:
    """All levels of concurrency. An engine of N rows has all requests from the start: N run, the others wait."""
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for level in setting.config.concurrency:
        runs = contestants_at(setting, level, _decoders(setting))
        times = compete(f"closed, {level} at a time", runs, setting)
        lines += [_line(level, name, runs, times) for name in runs]
        for name in (BLOCKS, AUTO):
            ratios[f"{name} over AR, {level} at a time"] = over(name, AR_NAME, runs, times)
    return PartResult(lines, ratios)


def _decoders(setting: Setting) -> dict[str, DecodeConfig]:
    blocks = setting.blocks
    auto = DecodeConfig(**{**blocks.__dict__, "mode": "auto"})
    return {AR_NAME: AR, BLOCKS: blocks, AUTO: auto}


def contestants_at(setting: Setting, level: int, decoders: Mapping[str, DecodeConfig]) -> dict[str, EngineContestant]:
    """The decoders in one engine of `level` rows, with the same questions, `per_slot` for each row at least."""
    count = max(setting.config.tasks, level * setting.config.per_slot)
    engine = setting.engine(setting.requests(AR, count), level)
    return {name: EngineContestant(engine, setting.requests(decode, count)) for name, decode in decoders.items()}


def _line(level: int, name: str, runs: Mapping[str, EngineContestant], times: Times) -> dict[str, Any]:
    modes = [result.mode for result in runs[name].results]
    return {**line("closed", level, name, runs, times), "share in blocks": modes.count("diffusion") / len(modes)}
