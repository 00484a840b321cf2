"""The parts of `bench.py engine`, one after another on one loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.config import DecodeConfig
from model.errors import UserError
from pipelines.benches.decode import DecodeBenchConfig, check_queries, measure_rounds
from pipelines.benches.engine.closed import measure_closed
from pipelines.benches.engine.config import EngineBenchConfig
from pipelines.benches.engine.floor import measure_floor
from pipelines.benches.engine.footprint import measure_memory
from pipelines.benches.engine.host import measure_host
from pipelines.benches.engine.lockstep import measure_lockstep
from pipelines.benches.engine.open_loop import measure_open
from pipelines.benches.engine.rivals import measure_rivals
from pipelines.benches.engine.setting import PartResult, Setting, open_setting, parse_decoder
from pipelines.benches.engine.single import measure_single
from pipelines.benches.result import Result, machine


def measure_forward(setting: Setting) -> PartResult:
    """A round's time by query length, as the bench `decode` measures it."""
    config = _decode_config(setting.config)
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for batch in sorted({1, setting.config.batch}):
        found = measure_rounds(setting.backbone, batch, config)
        lines += [{**line, "part": "forward"} for line in found[0]]
        ratios |= found[1]
    return PartResult(lines, ratios)


def _decode_config(config: EngineBenchConfig) -> DecodeBenchConfig:
    return DecodeBenchConfig(
        rounds=config.rounds, queries=config.queries, cached=config.cached, seed=config.seed, dtype=config.dtype
    )


PARTS: dict[str, Callable[[Setting], PartResult]] = {
    "single": measure_single,
    "rivals": measure_rivals,
    "closed": measure_closed,
    "lockstep": measure_lockstep,
    "open": measure_open,
    "host": measure_host,
    "memory": measure_memory,
    "forward": measure_forward,
    "floor": measure_floor,
}


def check(config: EngineBenchConfig) -> None:
    """Raises UserError for what can be told before anything is loaded."""
    for threshold in config.thresholds:
        DecodeConfig(threshold=threshold)
    for name in ("parts", "thresholds", "concurrency"):
        values = getattr(config, name)
        if not values or len(set(values)) < len(values):
            raise UserError(f"--{name} must name one or more, each once.")
    for text in config.also:
        parse_decoder(text)
    if min(config.concurrency) < 1:
        raise UserError(f"--concurrency {min(config.concurrency)}: at least 1.")
    if not 1 <= config.long_prompt[0] <= config.long_prompt[1]:
        raise UserError("--long_prompt wants the shortest and the longest, in this order.")
    if config.gguf is not None and not Path(config.gguf).is_file():
        raise UserError(f"--gguf {config.gguf}: no such file.")
    if "forward" in config.parts:
        check_queries(_decode_config(config))


def run_engine(config: EngineBenchConfig) -> Result:
    """Measure all parts that are asked for. Raises JobError where forms that must agree do not."""
    check(config)
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with open_setting(config) as setting:
        for part in config.parts:
            found = PARTS[part](setting)
            table += found.lines
            ratios |= found.ratios
        what = "adapted" if setting.adapted else "not adapted: how fast, not how good"
        note = f"{setting.name} ({what}), answers of at most {config.max_tokens} tokens, no prefix cache."
        form = config.dtype if config.weights == "model" else f"{config.dtype}, {config.weights} weights"
        return Result("engine", machine(form), config.rounds, table, ratios, note)
