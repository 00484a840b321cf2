"""The table of faults: every scenario at length on one service, as the JSON of a bench.

    python -m tests.faults.serve_table --output docs/benches/faults.json
    python pipelines/bench.py report --data docs/benches/*.json --output docs/benches/README.md

`--only "engine thread"` measures the faults whose names hold these words, and `--only "clients that leave"` those; the
file's other lines stay as they are. Exit code 1 where an answer was wrong or a request lost; the table is written all
the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.benches.result import Result, machine, print_result
from tests.faults.leaving import ROUND_S, Leaving, measure
from tests.faults.scenarios import SCENARIOS, Report, befall
from tests.faults.serving import CLIENTS, REPLICAS, rig

NOTE = (
    f"{CLIENTS} clients, half of their requests streamed, ask {REPLICAS} replicas of a tiny model; every answer is "
    "known beforehand. `struck`: requests under way at a fault; `errors`: in OpenAI's shape, as a status or an event; "
    "`resets`: connections to the killed process itself; `lost`: no answer and no proper error. Seconds from a fault "
    "until Serve no longer counts a replica with a broken engine as running (unhealthy), to the first right answer of "
    "a request that began after it (answered), until as much ran again as before (whole): medians and the longest. "
    f"`clients that leave`: with rounds of {ROUND_S:g} s, the rounds that ended between a client's closing its "
    "connection and its pages being free."
)
LEAVERS, LEAVING = 40, "clients that leave"


def line_of(report: Report) -> dict[str, Any]:
    assert report.tally is not None
    return {
        "fault": report.scenario.name,
        "times": len(report.faults),
        **report.tally.line(),
        "unhealthy s": median(report.unhealthy) if report.unhealthy else None,
        "longest unhealthy s": max(report.unhealthy, default=None),
        "answered s": median(report.answered),
        "longest s": max(report.answered),
        "whole s": median(report.whole),
        "longest whole s": max(report.whole),
    }


def line_of_leaving(leavings: Sequence[Leaving]) -> dict[str, Any]:
    rounds = [leaving.rounds for leaving in leavings]
    return {
        "part": LEAVING,
        "clients": len(leavings),
        "rounds": median(rounds),
        "most rounds": max(rounds),
        "seconds": median(leaving.seconds for leaving in leavings),
        "longest s": max(leaving.seconds for leaving in leavings),
    }


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old lines with the new ones in the place of those of the same name, and with new columns where they stand."""

    def name(line: dict[str, Any]) -> str:
        return str(line.get("fault") or line["part"])

    measured = {name(line): line for line in new}
    lines = [measured.pop(name(line), line) for line in old]
    shape = {key: None for line in new if "fault" in line for key in line}
    return [{**shape, **line} if "fault" in line else line for line in (*lines, *measured.values())]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="serve_table", description="Write the table of serving faults.")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--times", type=int, default=None, help="of each fault, instead of at length")
    parser.add_argument("--only", action="append", default=[], help="words of a fault's name; may be given again")
    arguments = parser.parse_args(argv)
    table, complaints = [], []

    def wanted(name: str) -> bool:
        return not arguments.only or any(words in name for words in arguments.only)

    with tempfile.TemporaryDirectory(prefix="faults-") as scratch, rig(Path(scratch)) as served:
        for scenario in filter(lambda scenario: wanted(scenario.name), SCENARIOS):
            if missing := scenario.missing(served):
                print(f"{scenario.name}: left out, {missing}", file=sys.stderr)
                continue
            report = befall(served, scenario, arguments.times or scenario.often)
            table.append(line_of(report))
            assert report.tally is not None
            complaints += [f"{scenario.name}: {complaint}" for complaint in report.tally.complaints]
            print(f"{table[-1]}", file=sys.stderr, flush=True)
        if wanted(LEAVING):
            served.settle()
            table.append(line_of_leaving(measure(served, LEAVERS)))
    if arguments.only and arguments.output.exists():
        table = merged(json.loads(arguments.output.read_text(encoding="utf-8"))["table"], table)
    result = Result("faults", machine("float32"), 1, table, {}, NOTE).to_dict()
    arguments.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_result(result)
    print(*complaints, sep="\n", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
