"""Measured claims: `python pipelines/bench.py NAME --output FILE.json`, the names being those of BENCHES below.

Each bench compares forms of the same computation in one run, in turns, checks that they agree where they must, and
writes one JSON (DESIGN "bench output") and one printed table. `bench.py report --data *.json --output README.md` puts
several results into one Markdown page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, ClassVar

from model.config import nearest_key
from model.errors import UserError
from pipelines.benches.attention import AttentionBenchConfig, run_attention
from pipelines.benches.decode import DecodeBenchConfig, run_decode
from pipelines.benches.engine.config import EngineBenchConfig
from pipelines.benches.engine.run import run_engine
from pipelines.benches.methods.config import MethodsBenchConfig
from pipelines.benches.methods.run import run_methods
from pipelines.benches.prepare.config import PrepareBenchConfig
from pipelines.benches.prepare.run import run_prepare
from pipelines.benches.result import BenchConfig, Result, markdown_of, print_result, publish, read_result
from pipelines.benches.serving.overhead import ServeBenchConfig, run_serve
from pipelines.benches.serving.soak import SoakBenchConfig, run_soak
from pipelines.benches.train import TrainBenchConfig, run_train
from pipelines.benches.training_memory import MemoryBenchConfig, run_memory
from pipelines.jobkit import JobConfig, OutputFile, main

BENCHES: dict[str, tuple[type[BenchConfig], Callable[[Any], Result]]] = {
    "attention": (AttentionBenchConfig, run_attention),
    "train": (TrainBenchConfig, run_train),
    "decode": (DecodeBenchConfig, run_decode),
    "engine": (EngineBenchConfig, run_engine),
    "serve": (ServeBenchConfig, run_serve),
    "soak": (SoakBenchConfig, run_soak),
    "memory": (MemoryBenchConfig, run_memory),
    "prepare": (PrepareBenchConfig, run_prepare),
    "methods": (MethodsBenchConfig, run_methods),
}
REPORT = "report"
USAGE = f"usage: python pipelines/bench.py {'|'.join(BENCHES)}|{REPORT} [--key value ...]   (--help behind a name)"


class ReportConfig(JobConfig):
    """Put the JSON results of benches (--data) into one Markdown page (--output)."""

    output_name: ClassVar[str] = "bench/README.md"


def run(name: str, config: BenchConfig) -> dict[str, Any]:
    """Measure one bench, write its JSON and print its table."""
    if config.data and not config.takes_data:
        raise UserError(f"bench {name} makes its own data: leave --data out.")
    with OutputFile(str(config.output), job=f"bench {name}", config=config) as output:
        if output.finished is not None:
            print(f"{config.output} is finished: remove it to measure again.")
            content = read_result(Path(str(config.output)))
            print_result(content)
            return content
        return publish(config, output, BENCHES[name][1](config))


def write_report(config: ReportConfig) -> dict[str, Any]:
    """The Markdown page of the results named by --data."""
    if not config.data:
        raise UserError("--data is required: the JSON files of the benches.")
    paths = [Path(name) for pattern in config.data for name in (sorted(glob(pattern)) or [pattern])]
    results = [(path.stem, read_result(path)) for path in paths if not path.name.endswith(".manifest.json")]
    target = Path(str(config.output))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f".{target.name}.partial")
    partial_file.write_text(markdown_of(results), encoding="utf-8")
    partial_file.replace(target)
    print(f"bench report: {target}")
    return {"results": len(results)}


def start(argv: Sequence[str]) -> int:
    """The bench's name first, then its keys; the exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in ("--help", "-h"):
        print(USAGE)
        return 0
    if name == REPORT:
        return main("bench report", ReportConfig, write_report, argv=rest)
    if name not in BENCHES:
        print(f"bench: {_complaint(name)}", file=sys.stderr)
        return 2
    return main(f"bench {name}", BENCHES[name][0], partial(run, name), argv=rest)


def _complaint(name: str) -> str:
    if not name or name.startswith("-"):
        return USAGE
    return f"{name!r} is no bench: {nearest_key(name, [*BENCHES, REPORT])}"


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
